//! How well the node is: the heartbeat of the main runtime, and what it says about readiness.
//! The heartbeat task alone judges and remembers; it publishes its findings as atomics, so that a
//! probe reads them without waiting for anybody and reading changes nothing. Answering is `probes`,
//! and looking at single workers, which a heartbeat cannot, is `workers`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use hub::hub::Phase;
use hub::telemetry::{Metrics, process};
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::readiness::{Readiness, Reason};
use super::workers::{Pool, Still, Workers};

/// Time between two heartbeats: a hundred samples a window make a 99th percentile. Measured: 20 ms
/// cost 0.6 % of a core in timer wake-ups, and below some 25 ms the lag shown is the timer's own.
pub const TICK: Duration = Duration::from_millis(100);
/// No heartbeat yet, and none needed.
const NO_TICK: u64 = u64::MAX;

/// One window of lag. Two of them, the running and the last one, are what the figures cover.
pub const WINDOW: Duration = Duration::from_secs(10);

/// So many ticks between two looks at what costs a system call or a sort: once a second.
const SLOW_TICKS: u64 = 10;

/// `at_capacity` ends so far below `ready_headroom`: 0.90 for the default 0.95.
const HEADROOM_BACK: f64 = 0.05;

/// A worker that stands still is told after `live_stale`, and ends liveness after so many times
/// that, a minute at the default. Later than a silent heartbeat does, for the others do its work
/// meanwhile and the price is every session: there is time to see it named and to look at its stack.
/// And surer: a worker that is busy without a pause shows that it moves every 61 polls only, and
/// sixty-one of a second each are beyond any load.
const WEDGED: u32 = 2;

/// What makes a node live and ready.
#[derive(Clone, Copy, Debug)]
pub struct ProbeConfig {
    /// `GATEWAY_LIVE_STALE`: not live when the last heartbeat is as old as this, or when a worker
    /// has stood still for twice as long.
    pub live_stale: Duration,
    /// `GATEWAY_READY_HEADROOM`: this part of the capacity is full, in (0.05, 1].
    pub ready_headroom: f64,
    /// `GATEWAY_READY_LAG`: a window whose p99 is above this is saturated.
    pub ready_lag: Duration,
    /// `GATEWAY_READY_REDIS_GRACE`; `None` for `GATEWAY_READY_REDIS=off`.
    pub ready_redis: Option<Duration>,
}

/// The pub/sub link as the heartbeat finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// It stands and hears the node's own beacons. The in-memory backplane is always so.
    Up,
    /// There is none.
    Down,
    /// It stands, but the node's own beacons do not come back.
    Deaf,
}

/// What probes may know of the node. Every read is an atomic load.
pub struct Vitals {
    config: ProbeConfig,
    capacity: usize,
    metrics: Arc<Metrics>,
    link: Box<dyn Fn() -> Link + Send + Sync>,
    /// What all times here are counted from, in ms: an `Instant` does not fit an atomic.
    base: Instant,
    tick_ms: AtomicU64,
    /// The same of the runtime at the door; `NO_TICK` where there is none.
    door_tick_ms: AtomicU64,
    phase: AtomicU8,
    is_started: AtomicBool,
    /// Reasons that the heartbeat found, by `Reason::bit`.
    reasons: AtomicU8,
    /// The last four windows, the latest in bit 0; 1: saturated.
    saturated: AtomicU8,
    lag_p99_ms: AtomicU64,
    /// Since `take_worst_lag` was last called.
    worst_lag_ms: AtomicU64,
    workers: Workers,
}

impl Vitals {
    /// `capacity` is the number of sessions in force. `link` is asked by the heartbeat at every
    /// tick, on the main runtime: it must neither block nor wait.
    pub fn new(
        config: ProbeConfig,
        capacity: usize,
        metrics: Arc<Metrics>,
        link: impl Fn() -> Link + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            config,
            capacity,
            metrics,
            link: Box::new(link),
            base: Instant::now(),
            tick_ms: AtomicU64::new(0),
            door_tick_ms: AtomicU64::new(NO_TICK),
            phase: AtomicU8::new(Phase::Starting as u8),
            is_started: AtomicBool::new(false),
            reasons: AtomicU8::new(0),
            saturated: AtomicU8::new(0),
            lag_p99_ms: AtomicU64::new(0),
            worst_lag_ms: AtomicU64::new(0),
            workers: Workers::default(),
        })
    }

    /// The phase the node entered; seen by the very next probe and in `gateway_phase`.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
        if phase == Phase::Serving {
            self.is_started.store(true, Ordering::Release);
        }
        self.metrics.phase(phase);
    }

    /// The phase last set.
    pub fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.phase.load(Ordering::Acquire))]
    }

    /// Did serving ever begin?
    pub fn is_started(&self) -> bool {
        self.is_started.load(Ordering::Acquire)
    }

    /// How long ago the main runtime last ran its heartbeat (or, before the first, since `new`).
    pub fn tick_age(&self) -> Duration {
        self.since(self.tick_ms.load(Ordering::Acquire))
    }

    /// The same of the runtime at the door; zero where there is none.
    pub fn door_tick_age(&self) -> Duration {
        let tick = self.door_tick_ms.load(Ordering::Acquire);
        if tick == NO_TICK { Duration::ZERO } else { self.since(tick) }
    }

    fn since(&self, ms: u64) -> Duration {
        self.base.elapsed().saturating_sub(Duration::from_millis(ms))
    }

    /// Are the heartbeats younger than `live_stale`, and has no worker stood still for twice that?
    /// Looks at nothing else: only what a restart mends may cause one.
    pub fn is_live(&self) -> bool {
        let stale = self.config.live_stale;
        let is_wedged = self.workers.still_for(stale.saturating_mul(WEDGED)).next().is_some();
        self.tick_age().max(self.door_tick_age()) < stale && !is_wedged
    }

    /// The workers that have stood still for `live_stale` or longer.
    pub(super) fn still_workers(&self) -> impl Iterator<Item = Still> + '_ {
        self.workers.still_for(self.config.live_stale)
    }

    /// Watches the workers of the runtimes on which the heartbeats run; ends only by being dropped.
    /// Run it on neither of them.
    pub(super) async fn watch_workers(&self) {
        self.workers.watch(self.config.live_stale).await;
    }

    /// Everything `/readyz` says.
    pub fn readiness(&self) -> Readiness {
        let phase = self.phase();
        let mut bits = self.reasons.load(Ordering::Acquire);
        bits |= match phase {
            Phase::Starting => Reason::Starting.bit(),
            Phase::Serving => 0,
            Phase::Draining | Phase::Stopped => Reason::Draining.bit(),
        };
        if is_saturated(missed(self.saturated.load(Ordering::Acquire), self.tick_age())) {
            bits |= Reason::Saturated.bit();
        }
        Readiness {
            ready: bits == 0,
            phase: phase.word(),
            reasons: Reason::ALL.into_iter().filter(|reason| bits & reason.bit() != 0).collect(),
            sessions: self.metrics.sessions_open(),
            capacity: self.capacity,
            lag_p99_ms: self.lag_p99_ms.load(Ordering::Acquire),
        }
    }

    /// For `/metrics`.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// How late the latest heartbeat of either runtime since the last call was; to be asked by one only, once a second
    /// or so: the windows of readiness are too slow for who steers by it.
    pub fn take_worst_lag(&self) -> Duration {
        Duration::from_millis(self.worst_lag_ms.swap(0, Ordering::AcqRel))
    }

    /// The heartbeat. Run it on the main runtime, for it is that runtime's pulse, and the workers it
    /// finds itself among are watched from then on; ends only by being dropped.
    ///
    /// # Cancel safety
    /// Safe at any point; a later call begins with empty windows.
    pub async fn run_heartbeat(self: Arc<Self>) {
        self.workers.enlist(Pool::Main, Handle::current().metrics());
        let started = Instant::now();
        let mut judge = Judge::new(self.config, self.capacity, started);
        let max_fds = process::max_fds();
        let mut due = started;
        for n in 0_u64.. {
            due += TICK;
            tokio::time::sleep_until(due).await;
            let now = Instant::now();
            // A tick that was missed altogether was late too: without those a stall of five
            // seconds would count as one late tick among a hundred.
            judge.lag(due, now);
            self.worst_lag_ms.fetch_max(millis(now.saturating_duration_since(due)), Ordering::AcqRel);
            while due + TICK <= now {
                due += TICK;
                judge.lag(due, now);
            }
            let is_slow_tick = n.is_multiple_of(SLOW_TICKS);
            let fds = if is_slow_tick { process::open_fds().zip(max_fds) } else { None };
            let link = (self.link)();
            // Read after the link was looked at: a link that is down was so by then, and no grace is
            // shorter than it is set for want of a turn in between.
            let now = Instant::now();
            judge.look(now, self.metrics.sessions_open(), link, fds);
            self.publish(&judge, now);
            if is_slow_tick {
                self.publish_lag(&judge);
            }
        }
    }

    /// The heartbeat of the runtime at the door, where newcomers have one of their own. Run it
    /// there, as the other; ends only by being dropped.
    ///
    /// # Cancel safety
    /// Safe at any point; once it ran, its silence counts.
    pub async fn run_door_heartbeat(self: Arc<Self>) {
        self.workers.enlist(Pool::Door, Handle::current().metrics());
        loop {
            let due = Instant::now() + TICK;
            self.door_tick_ms.store(millis(self.base.elapsed()), Ordering::Release);
            tokio::time::sleep_until(due).await;
            self.worst_lag_ms.fetch_max(millis(due.elapsed()), Ordering::AcqRel);
        }
    }

    fn publish(&self, judge: &Judge, now: Instant) {
        self.reasons.store(judge.reasons, Ordering::Release);
        self.saturated.store(judge.windows.saturated, Ordering::Release);
        self.tick_ms.store(millis(now.saturating_duration_since(self.base)), Ordering::Release);
    }

    fn publish_lag(&self, judge: &Judge) {
        let samples = judge.windows.sorted();
        let p99 = quantile(&samples, 0.99);
        self.lag_p99_ms.store(millis(p99), Ordering::Release);
        self.metrics.runtime_lag(quantile(&samples, 0.5), p99, quantile(&samples, 1.0));
    }
}

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The readiness findings that need a memory. Pure: time and facts come in as arguments.
struct Judge {
    config: ProbeConfig,
    /// `at_capacity` begins at so many sessions and ends below so many.
    full_at: usize,
    free_below: usize,
    windows: Windows,
    unheard_since: Option<Instant>,
    reasons: u8,
}

impl Judge {
    fn new(config: ProbeConfig, capacity: usize, now: Instant) -> Self {
        // The small term keeps 0.95 · 100 from becoming 96 by the error of a float.
        let part = |of: f64| ((of * capacity as f64 - 1e-6).ceil() as usize).max(1);
        Self {
            config,
            full_at: part(config.ready_headroom),
            free_below: part(config.ready_headroom - HEADROOM_BACK),
            windows: Windows::new(config.ready_lag, now),
            unheard_since: None,
            reasons: 0,
        }
    }

    /// A tick that was due at `due` was run at `now`.
    fn lag(&mut self, due: Instant, now: Instant) {
        self.windows.record(due, now.saturating_duration_since(due));
    }

    fn look(&mut self, now: Instant, n_sessions: usize, link: Link, fds: Option<(u64, u64)>) {
        if n_sessions >= self.full_at {
            self.set(Reason::AtCapacity);
        } else if n_sessions < self.free_below {
            self.clear(Reason::AtCapacity);
        }
        self.look_at_link(now, link);
        if let Some((open, max)) = fds {
            self.look_at_fds(open, max);
        }
    }

    fn look_at_link(&mut self, now: Instant, link: Link) {
        self.clear(Reason::PubsubDown);
        self.clear(Reason::PubsubDeaf);
        let reason = match link {
            Link::Up => {
                self.unheard_since = None;
                return;
            }
            Link::Down => Reason::PubsubDown,
            Link::Deaf => Reason::PubsubDeaf,
        };
        // One grace for both: a link that is down, then deaf, has heard nothing all the while.
        let since = *self.unheard_since.get_or_insert(now);
        if self.config.ready_redis.is_some_and(|grace| now - since > grace) {
            self.set(reason);
        }
    }

    /// Low: fewer than 2 % of the limit are free (at least 32: Redis, probes and the admin API
    /// live on them). Enough again at twice that.
    fn look_at_fds(&mut self, open: u64, max: u64) {
        let free = max.saturating_sub(open);
        let reserve = (max / 50).max(32);
        if free < reserve {
            self.set(Reason::FdLow);
        } else if free >= 2 * reserve {
            self.clear(Reason::FdLow);
        }
    }

    fn set(&mut self, reason: Reason) {
        self.reasons |= reason.bit();
    }

    fn clear(&mut self, reason: Reason) {
        self.reasons &= !reason.bit();
    }
}

/// Lateness of the ticks of the running window and the one before, and what became of the last four.
/// Bounded: a window has `WINDOW / TICK` ticks.
struct Windows {
    ready_lag: Duration,
    ends: Instant,
    running: Vec<Duration>,
    last: Vec<Duration>,
    saturated: u8,
}

impl Windows {
    fn new(ready_lag: Duration, now: Instant) -> Self {
        Self { ready_lag, ends: now + WINDOW, running: Vec::new(), last: Vec::new(), saturated: 0 }
    }

    /// A tick belongs to the window in which it was due: a long stall fills every window it touched.
    fn record(&mut self, due: Instant, lag: Duration) {
        while due >= self.ends {
            self.running.sort_unstable();
            let is_late = quantile(&self.running, 0.99) > self.ready_lag;
            self.saturated = (self.saturated << 1 | u8::from(is_late)) & 0b1111;
            std::mem::swap(&mut self.last, &mut self.running);
            self.running.clear();
            self.ends += WINDOW;
        }
        self.running.push(lag);
    }

    fn sorted(&self) -> Vec<Duration> {
        let mut all = [&self.last[..], &self.running[..]].concat();
        all.sort_unstable();
        all
    }
}

/// The last four windows as they will be judged when the heartbeat comes back after `tick_age`:
/// every whole window without a tick is a saturated one.
fn missed(saturated: u8, tick_age: Duration) -> u8 {
    let n = (tick_age.as_secs() / WINDOW.as_secs()).min(4);
    ((u32::from(saturated) << n | ((1 << n) - 1)) & 0b1111) as u8
}

fn is_saturated(windows: u8) -> bool {
    windows.count_ones() >= 3
}

/// The nearest-rank quantile of sorted samples; zero where there are none.
fn quantile(sorted: &[Duration], q: f64) -> Duration {
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use hub::close::CloseReason;
    use hub::event::Wire;

    use super::*;

    const CONFIG: ProbeConfig = ProbeConfig {
        live_stale: Duration::from_secs(30),
        ready_headroom: 0.95,
        ready_lag: Duration::from_millis(250),
        ready_redis: Some(Duration::from_secs(10)),
    };

    fn reasons(judge: &Judge) -> Vec<Reason> {
        let saturated = if is_saturated(judge.windows.saturated) { Reason::Saturated.bit() } else { 0 };
        let bits = judge.reasons | saturated;
        Reason::ALL.into_iter().filter(|reason| bits & reason.bit() != 0).collect()
    }

    /// Plays whole windows, in each of which so many of the hundred ticks are so late.
    fn play(judge: &mut Judge, start: Instant, windows: &[(usize, Duration)]) {
        let n = (WINDOW.as_millis() / TICK.as_millis()) as usize;
        for (w, (n_late, lag)) in windows.iter().enumerate() {
            for tick in 0..n {
                let due = start + WINDOW * w as u32 + TICK * tick as u32;
                let lag = if tick < *n_late { *lag } else { Duration::from_millis(2) };
                judge.lag(due, due + lag);
            }
        }
        // A window is judged by the first tick after it.
        let after = start + WINDOW * windows.len() as u32;
        judge.lag(after, after);
    }

    #[test]
    fn full_begins_at_the_headroom_and_ends_below_five_points_less() {
        let now = Instant::now();
        let mut judge = Judge::new(CONFIG, 100, now);
        for (n, expected) in [(94, false), (95, true), (94, true), (90, true), (89, false), (94, false), (100, true)] {
            judge.look(now, n, Link::Up, None);
            assert_eq!(reasons(&judge) == [Reason::AtCapacity], expected, "{n}");
        }
    }

    #[test]
    fn a_capacity_of_one_is_full_with_one_session() {
        let now = Instant::now();
        let mut judge = Judge::new(CONFIG, 1, now);
        for (n, expected) in [(0, 0), (1, 1), (0, 0)] {
            judge.look(now, n, Link::Up, None);
            assert_eq!(reasons(&judge).len(), expected, "{n}");
        }
    }

    #[test]
    fn three_late_windows_of_the_last_four_saturate_and_two_do_not() {
        let (late, fine) = ((100, Duration::from_millis(251)), (0, Duration::ZERO));
        let cases: [(&[(usize, Duration)], bool); 5] = [
            (&[late, late], false),
            (&[late, late, late], true),
            (&[late, fine, late, late], true),
            (&[late, late, late, fine, fine], false),
            (&[(100, Duration::from_millis(250)); 4], false),
        ];
        for (windows, expected) in cases {
            let start = Instant::now();
            let mut judge = Judge::new(CONFIG, 100, start);
            play(&mut judge, start, windows);
            assert_eq!(reasons(&judge) == [Reason::Saturated], expected, "{windows:?}");
        }
    }

    #[test]
    fn one_late_tick_in_a_hundred_is_no_saturation_and_two_are() {
        for (n_late, expected) in [(1, false), (2, true)] {
            let start = Instant::now();
            let mut judge = Judge::new(CONFIG, 100, start);
            play(&mut judge, start, &[(n_late, Duration::from_secs(1)); 4]);
            assert_eq!(is_saturated(judge.windows.saturated), expected, "{n_late}");
        }
    }

    #[test]
    fn a_runtime_that_stands_still_saturates_before_it_moves_again() {
        let secs = Duration::from_secs;
        for (verdicts, age, expected) in [
            (0, 29, false),
            (0, 30, true),
            (0b0011, 9, false),
            (0b0011, 10, true),
            (0b1100, 10, false),
            (0, 9999, true),
        ] {
            assert_eq!(is_saturated(missed(verdicts, secs(age))), expected, "{verdicts:b} after {age} s");
        }
    }

    #[test]
    fn a_link_may_be_gone_for_the_grace_and_no_longer() {
        let start = Instant::now();
        let secs = Duration::from_secs;
        for (link, reason) in [(Link::Down, Reason::PubsubDown), (Link::Deaf, Reason::PubsubDeaf)] {
            let mut judge = Judge::new(CONFIG, 100, start);
            judge.look(start, 0, link, None);
            judge.look(start + secs(10), 0, link, None);
            assert_eq!(reasons(&judge), []);
            judge.look(start + secs(10) + TICK, 0, link, None);
            assert_eq!(reasons(&judge), [reason]);
            judge.look(start + secs(11), 0, Link::Up, None);
            assert_eq!(reasons(&judge), []);
            judge.look(start + secs(12), 0, link, None);
            assert_eq!(reasons(&judge), [], "the grace begins anew");
        }
    }

    #[test]
    fn a_link_that_is_down_then_deaf_has_one_grace() {
        let start = Instant::now();
        let mut judge = Judge::new(CONFIG, 100, start);
        judge.look(start, 0, Link::Down, None);
        judge.look(start + Duration::from_secs(9), 0, Link::Deaf, None);
        judge.look(start + Duration::from_secs(11), 0, Link::Deaf, None);
        assert_eq!(reasons(&judge), [Reason::PubsubDeaf]);
    }

    #[test]
    fn redis_may_be_left_out_of_readiness() {
        let start = Instant::now();
        let mut judge = Judge::new(ProbeConfig { ready_redis: None, ..CONFIG }, 100, start);
        for s in [0, 11, 3600] {
            judge.look(start + Duration::from_secs(s), 0, Link::Down, None);
        }
        assert_eq!(reasons(&judge), []);
    }

    #[test]
    fn few_free_descriptors_are_told_until_there_are_twice_as_many() {
        let now = Instant::now();
        let mut judge = Judge::new(CONFIG, 100, now);
        for (free, expected) in [(200, false), (199, true), (399, true), (400, false), (200, false), (0, true)] {
            judge.look(now, 0, Link::Up, Some((10_000 - free, 10_000)));
            assert_eq!(reasons(&judge) == [Reason::FdLow], expected, "{free}");
        }
        judge.look(now, 0, Link::Up, None);
        assert_eq!(reasons(&judge), [Reason::FdLow], "no news changes nothing");
    }

    #[test]
    fn each_phase_has_its_reason_and_startup_is_remembered() {
        let vitals = Vitals::new(CONFIG, 100, Metrics::new("0"), || Link::Up);
        assert_eq!((vitals.readiness().reasons, vitals.is_started()), (vec![Reason::Starting], false));
        for (phase, expected) in [
            (Phase::Serving, vec![]),
            (Phase::Draining, vec![Reason::Draining]),
            (Phase::Stopped, vec![Reason::Draining]),
        ] {
            vitals.set_phase(phase);
            let readiness = vitals.readiness();
            assert_eq!((readiness.ready, readiness.phase), (expected.is_empty(), phase.word()));
            assert_eq!((readiness.reasons, vitals.is_started()), (expected, true));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_heartbeat_sees_sessions_come_and_go_and_its_own_lateness() {
        let metrics = Metrics::new("0");
        let vitals = Vitals::new(CONFIG, 1, Arc::clone(&metrics), || Link::Up);
        vitals.set_phase(Phase::Serving);
        let mut heartbeat = std::pin::pin!(Arc::clone(&vitals).run_heartbeat());
        // The heart beats only inside this: between two calls the runtime stands still.
        let mut beat_for = async |time| {
            let _ = tokio::time::timeout(time, &mut heartbeat).await;
        };
        metrics.session_opened(Wire::Ws);
        beat_for(TICK * 2).await;
        assert_eq!(vitals.readiness().reasons, [Reason::AtCapacity]);
        assert!(vitals.tick_age() <= TICK);
        metrics.session_closed(Wire::Ws, CloseReason::Client);
        beat_for(TICK * 2).await;
        assert!(vitals.readiness().ready);

        tokio::time::advance(Duration::from_secs(40)).await;
        assert!(!vitals.is_live());
        assert_eq!(vitals.readiness().reasons, [Reason::Saturated]);
        beat_for(TICK * 2).await;
        assert!(vitals.is_live());
        assert_eq!(vitals.readiness().reasons, [Reason::Saturated], "what it missed counts");
        beat_for(Duration::from_secs(2)).await;
        assert!(vitals.readiness().lag_p99_ms > 250);
        beat_for(WINDOW * 4).await;
        assert!(vitals.readiness().ready);
        assert!(vitals.readiness().lag_p99_ms < 25);
    }

    #[tokio::test(start_paused = true)]
    async fn a_door_that_stands_still_fails_liveness_and_is_late_for_who_steers_by_it() {
        let vitals = Vitals::new(CONFIG, 100, Metrics::new("test"), || Link::Up);
        vitals.set_phase(Phase::Serving);
        let mut main = std::pin::pin!(Arc::clone(&vitals).run_heartbeat());
        let mut door = std::pin::pin!(Arc::clone(&vitals).run_door_heartbeat());
        assert_eq!(vitals.door_tick_age(), Duration::ZERO, "there is none yet");
        let _ = tokio::time::timeout(TICK * 3, futures_util::future::join(&mut main, &mut door)).await;
        assert!(vitals.is_live() && vitals.door_tick_age() <= TICK);
        let _ = vitals.take_worst_lag();

        // The main runtime goes on, the door does not.
        let _ = tokio::time::timeout(CONFIG.live_stale + TICK, &mut main).await;
        assert!(!vitals.is_live() && vitals.tick_age() <= TICK && vitals.readiness().ready);
        assert_eq!(vitals.take_worst_lag(), Duration::ZERO, "its next beat will tell");
        let _ = tokio::time::timeout(TICK / 2, &mut door).await;
        assert!(vitals.is_live());
        assert!(vitals.take_worst_lag() >= CONFIG.live_stale - 2 * TICK);
    }

    #[tokio::test]
    async fn a_worker_that_stands_still_is_named_first_and_ends_liveness_at_twice_that() {
        let vitals = Vitals::new(CONFIG, 100, Metrics::new("test"), || Link::Up);
        for pool in [Pool::Main, Pool::Door] {
            vitals.workers.enlist(pool, Handle::current().metrics());
            for (ms, is_named, is_live) in [
                (29_999, false, true),
                (30_000, true, true),
                (59_999, true, true),
                (60_000, true, false),
                (3_600_000, true, false),
                (0, false, true),
            ] {
                let time = Duration::from_millis(ms);
                let still = Still { pool, worker: 0, time };
                vitals.workers.set(still);
                let named: Vec<_> = vitals.still_workers().collect();
                assert_eq!((named.contains(&still), named.len()), (is_named, usize::from(is_named)), "{ms}");
                assert_eq!((vitals.is_live(), vitals.readiness().reasons.len()), (is_live, 1), "{ms}");
            }
        }
    }
}
