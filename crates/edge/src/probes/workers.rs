//! Which worker thread stands still: a task that blocks takes its worker with it, and the heartbeat
//! does not see that, for the other workers carry it on. The probe thread looks at the figures that
//! the runtimes keep of their workers, decides how long each has stood still and tells the log.
//! What follows from it for `/livez` stands in `vitals`.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::RuntimeMetrics;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::vitals::millis;

/// Looks in the time after which a worker is told: one that stands still is seen this part of it late.
const LOOKS: u32 = 30;

/// Looks need not be closer than this: once a second at the default of `GATEWAY_LIVE_STALE`.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A look counts for no more than so many pauses between looks. A process that was stopped, or a
/// machine that slept, had its workers stand still for as long as the probe thread itself: that says
/// nothing about them.
const LONGEST_STEP: u32 = 5;

/// The runtimes whose workers are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pool {
    Main,
    Door,
}

impl Pool {
    const ALL: [Pool; 2] = [Pool::Main, Pool::Door];

    /// As `/livez` and the log call it.
    pub(super) fn word(self) -> &'static str {
        match self {
            Pool::Main => "main",
            Pool::Door => "door",
        }
    }
}

/// A worker and how long it has stood still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Still {
    pub(super) pool: Pool,
    /// Its index in the runtime.
    pub(super) worker: usize,
    pub(super) time: Duration,
}

/// The workers of both runtimes, as the probe thread last found them. Reads are atomic loads.
#[derive(Default)]
pub(super) struct Workers([OnceLock<Known>; Pool::ALL.len()]);

struct Known {
    metrics: RuntimeMetrics,
    still_ms: Box<[AtomicU64]>,
}

impl Workers {
    /// These are the workers of `pool` from now on. The first to be named stay.
    pub(super) fn enlist(&self, pool: Pool, metrics: RuntimeMetrics) {
        self.0[pool as usize].get_or_init(|| {
            let still_ms = (0..metrics.num_workers()).map(|_| AtomicU64::new(0)).collect();
            Known { metrics, still_ms }
        });
    }

    /// Those who have stood still for this long or longer.
    pub(super) fn still_for(&self, at_least: Duration) -> impl Iterator<Item = Still> + '_ {
        let all = Pool::ALL.into_iter().filter_map(|pool| Some((pool, self.0[pool as usize].get()?)));
        all.flat_map(|(pool, known)| {
            known.still_ms.iter().enumerate().map(move |(worker, ms)| {
                let time = Duration::from_millis(ms.load(Ordering::Acquire));
                Still { pool, worker, time }
            })
        })
        .filter(move |still| still.time >= at_least)
    }

    /// As if it had been found so.
    #[cfg(test)]
    pub(super) fn set(&self, Still { pool, worker, time }: Still) {
        self.0[pool as usize].get().unwrap().still_ms[worker].store(millis(time), Ordering::Release);
    }

    /// Looks at them until dropped, and tells the log of those who stand still for `told_after`.
    /// Run it away from the runtimes that it watches.
    ///
    /// # Cancel safety
    /// Safe at any point; a later call tells anew.
    pub(super) async fn watch(&self, told_after: Duration) {
        let pause = (told_after / LOOKS).clamp(Duration::from_millis(1), LONGEST_PAUSE);
        let mut looks = interval(pause);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut watch = Watch::new(told_after, pause * LONGEST_STEP, Instant::now());
        let mut teller: Option<JoinHandle<()>> = None;
        loop {
            looks.tick().await;
            watch.look(self, Instant::now());
            // News waits for the news before it: no more than one thread hangs on a log that does.
            if teller.as_ref().is_none_or(JoinHandle::is_finished) {
                teller = tell(watch.news());
            }
        }
    }
}

/// Logs from a thread of its own. A worker may stand still because nobody reads the log, and who
/// writes to it then stands still as well: the probe thread must go on answering.
fn tell(news: Vec<Still>) -> Option<JoinHandle<()>> {
    if news.is_empty() {
        return None;
    }
    let lines = move || {
        for Still { pool, worker, time } in news {
            let (runtime, still_ms) = (pool.word(), millis(time));
            if time.is_zero() {
                tracing::warn!(runtime, worker, "the worker thread moves again");
            } else {
                tracing::error!(runtime, worker, still_ms, "a worker thread stands still, a task must be blocking it");
            }
        }
    };
    // Without a thread to be had the log goes without; `/livez` says it still.
    std::thread::Builder::new().name("probe-log".into()).spawn(lines).ok()
}

/// What a runtime says of one of its workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reading {
    /// How often it went to sleep and woke up: odd while it sleeps.
    turns: u64,
    /// How long it has been busy. A worker that never sleeps moves this every 61 polls.
    busy: Duration,
}

impl Reading {
    /// Two atomic loads; nothing that a worker could hold.
    fn of(metrics: &RuntimeMetrics, worker: usize) -> Self {
        Self { turns: metrics.worker_park_unpark_count(worker), busy: metrics.worker_total_busy_duration(worker) }
    }

    fn is_asleep(self) -> bool {
        self.turns % 2 == 1
    }
}

/// What the probe thread remembers between two looks. Pure but for the readings.
struct Watch {
    told_after: Duration,
    longest_step: Duration,
    looked: Instant,
    pools: [Vec<Worker>; Pool::ALL.len()],
}

impl Watch {
    fn new(told_after: Duration, longest_step: Duration, now: Instant) -> Self {
        Self { told_after, longest_step, looked: now, pools: [Vec::new(), Vec::new()] }
    }

    fn look(&mut self, workers: &Workers, now: Instant) {
        let passed = now.saturating_duration_since(self.looked).min(self.longest_step);
        self.looked = now;
        for (seen, known) in self.pools.iter_mut().zip(&workers.0) {
            let Some(known) = known.get() else { continue };
            for (index, still_ms) in known.still_ms.iter().enumerate() {
                let reading = Reading::of(&known.metrics, index);
                match seen.get_mut(index) {
                    Some(worker) => worker.look(reading, passed),
                    None => seen.push(Worker::new(reading)),
                }
                still_ms.store(millis(seen[index].still), Ordering::Release);
            }
        }
    }

    /// Who began to stand still, and who moves again (a time of zero), since it was last asked.
    fn news(&mut self) -> Vec<Still> {
        let mut news = Vec::new();
        for (pool, workers) in Pool::ALL.into_iter().zip(&mut self.pools) {
            for (index, worker) in workers.iter_mut().enumerate() {
                let is_still = worker.still >= self.told_after;
                if worker.is_told != is_still {
                    worker.is_told = is_still;
                    let time = if is_still { worker.still } else { Duration::ZERO };
                    news.push(Still { pool, worker: index, time });
                }
            }
        }
        news
    }
}

struct Worker {
    reading: Reading,
    still: Duration,
    is_told: bool,
}

impl Worker {
    fn new(reading: Reading) -> Self {
        Self { reading, still: Duration::ZERO, is_told: false }
    }

    /// Awake, and nothing of it has moved since the last look, `passed` ago: it stood still.
    fn look(&mut self, reading: Reading, passed: Duration) {
        let is_still = !reading.is_asleep() && reading == self.reading;
        self.still = if is_still { self.still + passed } else { Duration::ZERO };
        self.reading = reading;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::time::sleep;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const TOLD_AFTER: Duration = Duration::from_secs(30);

    /// Longest wait for what must come; never waited for in full when all is well.
    const PATIENCE: Duration = Duration::from_secs(20);

    fn awake(turns: u64, busy_ms: u64) -> Reading {
        assert_eq!(turns % 2, 0);
        Reading { turns, busy: Duration::from_millis(busy_ms) }
    }

    #[test]
    fn a_worker_that_sleeps_for_an_hour_does_not_stand_still() {
        let asleep = Reading { turns: 7, busy: SECOND };
        let mut worker = Worker::new(asleep);
        for _ in 0..3600 {
            worker.look(asleep, SECOND);
            assert_eq!(worker.still, Duration::ZERO);
        }
    }

    #[test]
    fn a_worker_that_moves_in_either_figure_does_not_stand_still() {
        let mut worker = Worker::new(awake(0, 0));
        for n in 1..100 {
            worker.look(awake(0, n), SECOND);
            assert_eq!(worker.still, Duration::ZERO, "busy for {n} ms");
        }
        for n in 1..100 {
            worker.look(awake(2 * n, 99), SECOND);
            assert_eq!(worker.still, Duration::ZERO, "woken {n} times");
        }
    }

    #[test]
    fn a_worker_that_is_awake_and_does_not_move_stands_still_until_it_moves_or_sleeps() {
        for moved in [awake(4, 51), awake(6, 50), Reading { turns: 5, busy: SECOND }] {
            let mut worker = Worker::new(awake(4, 50));
            for n in 1..=60 {
                worker.look(awake(4, 50), SECOND);
                assert_eq!(worker.still, SECOND * n);
            }
            worker.look(moved, SECOND);
            assert_eq!(worker.still, Duration::ZERO, "{moved:?}");
        }
    }

    /// A runtime with two workers, and a task that beats on whichever is free.
    struct Pulse {
        runtime: Option<tokio::runtime::Runtime>,
        beats: mpsc::Receiver<()>,
    }

    impl Pulse {
        fn start() -> Self {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let (beat, beats) = mpsc::channel();
            runtime.spawn(async move {
                while beat.send(()).is_ok() {
                    sleep(Duration::from_millis(5)).await;
                }
            });
            Self { runtime: Some(runtime), beats }
        }

        fn runtime(&self) -> &tokio::runtime::Runtime {
            self.runtime.as_ref().unwrap()
        }

        /// Blocks one worker, and returns when it is blocked; dropping what this gives releases it.
        fn block_one(&self) -> mpsc::Sender<()> {
            let (release, released) = mpsc::channel();
            let (blocked, is_blocked) = mpsc::channel();
            self.runtime().spawn(async move {
                blocked.send(()).unwrap();
                let _ = released.recv();
            });
            is_blocked.recv_timeout(PATIENCE).unwrap();
            release
        }

        /// Two beats from now on: the worker that runs them slept and woke in between.
        fn wait(&self) {
            while self.beats.try_recv().is_ok() {}
            for _ in 0..2 {
                self.beats.recv_timeout(PATIENCE).expect("the other worker carries on");
            }
        }
    }

    impl Drop for Pulse {
        fn drop(&mut self) {
            self.runtime.take().unwrap().shutdown_background();
        }
    }

    #[test]
    fn one_blocked_worker_of_two_is_told_once_by_its_index_and_its_return_too() {
        let pulse = Pulse::start();
        let release = pulse.block_one();
        let workers = Workers::default();
        workers.enlist(Pool::Door, pulse.runtime().metrics());
        let mut now = Instant::now();
        let mut watch = Watch::new(TOLD_AFTER, SECOND * LONGEST_STEP, now);
        let mut look = |watch: &mut Watch| {
            pulse.wait();
            now += SECOND;
            watch.look(&workers, now);
        };

        // It may have blocked for how long ever: the first look says only where it is.
        look(&mut watch);
        let before = [0, 1].map(|worker| Reading::of(&pulse.runtime().metrics(), worker));
        for _ in 0..29 {
            look(&mut watch);
            assert_eq!(watch.news(), []);
        }
        look(&mut watch);
        let news = watch.news();
        let [Still { pool: Pool::Door, worker, time: TOLD_AFTER }] = news[..] else { panic!("{news:?}") };
        assert_eq!(Reading::of(&pulse.runtime().metrics(), worker), before[worker]);
        assert_ne!(Reading::of(&pulse.runtime().metrics(), 1 - worker), before[1 - worker]);
        assert_eq!(workers.still_for(TOLD_AFTER).collect::<Vec<_>>(), news);
        assert_eq!(workers.still_for(TOLD_AFTER + SECOND).count(), 0);
        look(&mut watch);
        assert_eq!((watch.news(), workers.still_for(TOLD_AFTER + SECOND).count()), (vec![], 1), "told already");

        drop(release);
        let mut n_looks = 0;
        while workers.still_for(TOLD_AFTER).next().is_some() {
            n_looks += 1;
            assert!(n_looks < 1000, "it never came back");
            look(&mut watch);
        }
        assert_eq!(watch.news(), [Still { pool: Pool::Door, worker, time: Duration::ZERO }]);
        assert_eq!(watch.news(), []);
    }

    #[test]
    fn a_process_that_was_stopped_tells_of_nobody() {
        let pulse = Pulse::start();
        let workers = Workers::default();
        workers.enlist(Pool::Main, pulse.runtime().metrics());
        let start = Instant::now();
        let mut watch = Watch::new(TOLD_AFTER, SECOND * LONGEST_STEP, start);
        let _release = pulse.block_one();
        watch.look(&workers, start);
        pulse.wait();
        watch.look(&workers, start + TOLD_AFTER * 100);
        assert_eq!(watch.news(), []);
        assert_eq!(workers.still_for(SECOND * LONGEST_STEP).count(), 1);
    }
}
