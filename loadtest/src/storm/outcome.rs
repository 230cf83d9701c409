//! What a storm's figures mean: how soon everybody was back, what it took, what the others felt, and
//! which bounds were kept. Decides nothing about the storm itself.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;

use super::crowd::{Manner, Record};
use super::{Options, Scenario, Storm};
use crate::histogram::Histogram;
use crate::probe::Metrics;
use crate::report::{Bound, Report, Sheet};
use crate::timeline::{BIN, PER_SECOND as BINS_A_SECOND, bars, quantile};

/// The widest first delay of our client.
const FIRST_DELAY: Duration = Duration::from_secs(5);
/// A time counts as one of full demand where so many times the refill came to the door: below it,
/// a bucket that is not emptied is no fault of the server's.
const DEMAND: f64 = 1.5;

pub fn judge(options: &Options, storm: &Storm) -> Report {
    let mut sheet = Sheet::new("storm");
    let word = |scenario| match scenario {
        Scenario::Incident => "incident",
        Scenario::OneFull => "one-full",
    };
    sheet.figure("scenario", "scenario", word(options.scenario), "");
    sheet.figure("clients", "clients", format!("{:?}", options.clients).to_lowercase(), "");
    sheet.figure("crowd", "clients that lost their node", storm.plan.n_victims, "");
    let back = returns(options, storm, &mut sheet);
    flow(options, storm, &back, &mut sheet);
    server(options, storm, &mut sheet);
    others(options, storm, &mut sheet);
    sheet.finish()
}

impl Storm {
    fn victims(&self) -> &[Record] {
        &self.world.records[..self.world.n_victims]
    }

    fn n_living(&self) -> f64 {
        (self.plan.n_gateways - 1) as f64
    }

    /// Admissions a second that the living gain together.
    fn refill(&self) -> f64 {
        f64::from(self.plan.rate) * self.n_living()
    }

    fn bursts(&self) -> f64 {
        f64::from(self.plan.burst) * self.n_living()
    }

    /// The shortest time in which the buckets let the crowd in, in seconds.
    fn permitted(&self) -> f64 {
        ((self.plan.n_victims as f64 - self.bursts()) / self.refill()).max(0.0)
    }
}

/// When they were back, with how many attempts, and whether anything was missed.
fn returns(options: &Options, storm: &Storm, sheet: &mut Sheet) -> Vec<Duration> {
    let victims = storm.victims();
    let mut back: Vec<Duration> = victims.iter().filter_map(Record::back).collect();
    back.sort();
    let n = victims.len() as f64;
    // Whoever is not back has no time: a quantile of all is known only if enough are.
    let at = |part: f64| {
        let is_known = back.len() as f64 >= (n * part).ceil();
        quantile(&back, part * n / back.len().max(1) as f64).filter(|_| is_known).map(|at| at.as_secs_f64())
    };
    // The kernel of a busy machine takes its time to end ten thousand connections of a dead process.
    let noticed = |part| storm.world.noticed.quantile(part).map(|at| at.as_secs_f64());
    sheet.figure("noticed_p50_s", "noticed the loss, 50 %", noticed(0.5), "s");
    sheet.figure("noticed_p99_s", "noticed the loss, 99 %", noticed(0.99), "s");
    sheet.figure("back", "came back", back.len(), "");
    for (key, title, part) in [
        ("t50_s", "time until 50 % are back", 0.5),
        ("t90_s", "time until 90 % are back", 0.9),
        ("t99_s", "time until 99 % are back", 0.99),
        ("t100_s", "time until all are back", 1.0),
    ] {
        sheet.figure(key, title, at(part), "s");
    }
    sheet.figure("permitted_s", "what the buckets permit", storm.permitted(), "s");
    let attempts: Vec<u32> = victims.iter().map(|record| record.n_attempts.load(Ordering::Relaxed)).collect();
    let mean = f64::from(attempts.iter().sum::<u32>()) / n;
    sheet.figure("attempts_mean", "attempts a client, mean", mean, "");
    sheet.figure("attempts_max", "attempts a client, most", attempts.iter().max().copied(), "");
    sheet.promise("clients that never came back", Some(n - back.len() as f64), Bound::AtMost(0.0), "");
    if options.clients == Manner::Ours {
        let bound = 1.2 * storm.permitted().max(FIRST_DELAY.as_secs_f64());
        sheet.promise("time until 99 % are back", at(0.99).or(Some(f64::INFINITY)), Bound::AtMost(bound), "s");
        sheet.promise("attempts a client, mean", Some(mean), Bound::AtMost(2.0), "");
        let resumed: u32 = victims.iter().map(|record| record.is_resumed.load(Ordering::Relaxed)).sum();
        sheet.figure("resumed_share", "resumed without a gap", f64::from(resumed) / n, "of all");
        sheet.promise("returned clients resumed", Some(f64::from(resumed) / n), Bound::AtLeast(1.0), "of all");
        let wrong = victims.iter().filter(|record| record.n_heard.load(Ordering::Relaxed) != storm.n_missed).count();
        sheet.promise("clients that missed or doubled an event", Some(wrong as f64), Bound::AtMost(0.0), "");
    }
    back
}

/// How evenly they came, and whether the buckets were used.
fn flow(options: &Options, storm: &Storm, back: &[Duration], sheet: &mut Sheet) {
    let world = &storm.world;
    let (attempts, admitted) = (world.attempts.seconds(), world.admitted.seconds());
    sheet.line("attempts (#) and admissions (.) a second:");
    for line in bars(&attempts, &admitted) {
        sheet.line(line);
    }
    sheet.data("attempts_per_s", attempts.clone());
    sheet.data("admitted_per_s", admitted);
    sheet.figure("attempts_peak_per_s", "most attempts in a second", attempts.iter().max().copied(), "/s");
    let refused = world.refused.lock().expect("nothing panics while it is held").clone();
    sheet.figure("refused", "refused, as the clients saw it", words(&refused), "");
    if options.open {
        return;
    }
    let last = back.last().copied().unwrap_or(Duration::MAX);
    let full = full_demand(storm, 1, last);
    let [least, least_of_five] = [1, 5].map(|n_seconds| {
        let windows = full_demand(storm, n_seconds, last).into_iter();
        let opened = |at: usize| storm.seen.opened_by(BIN * at as u32);
        let opened_from = |at: usize| opened(at + n_seconds * BINS_A_SECOND) - opened(at);
        let share = |at: usize| opened_from(at) / n_seconds as f64 / storm.refill();
        windows.map(|at| (share(at), at)).min_by(|a, b| a.0.total_cmp(&b.0))
    });
    sheet.figure("full_demand_s", "time with full demand", full.len() as f64 / 10.0, "s");
    sheet.figure(
        "goodput_min",
        "goodput, worst second of those",
        least.map(|(least, _)| least * 100.0),
        "% of the refill",
    );
    sheet.figure(
        "goodput_min_at_s",
        "which began",
        least.map(|(_, at)| at as f64 * BIN.as_secs_f64()),
        "s after the kill",
    );
    let five = least_of_five.map(|(least, _)| least * 100.0);
    sheet.figure("goodput_min_5s", "goodput, worst five seconds", five, "% of the refill");
    let sustained = sustained_rate(storm, &full);
    sheet.figure("sustained_per_s", "admitted under full demand", sustained, "/s without the burst");
    sheet.figure("refill_per_s", "configured", storm.refill(), "/s");
    if options.clients == Manner::Plain {
        sheet.promise("goodput, worst second", least.map(|(least, _)| 100.0 * least), Bound::AtLeast(95.0), "%");
        let off = sustained.map(|sustained| 100.0 * (sustained / storm.refill() - 1.0).abs());
        sheet.promise("sustained rate off the configured one", off, Bound::AtMost(5.0), "%");
    }
}

/// The windows of so many seconds that met full demand all along: each of their bins did, and the
/// bursts were used up before. Until then nobody waits for the refill.
fn full_demand(storm: &Storm, n_seconds: usize, until: Duration) -> Vec<usize> {
    let needed = DEMAND * storm.refill() * BIN.as_secs_f64();
    let is_full: Vec<bool> =
        storm.world.demand.bins(until).into_iter().map(|tries| f64::from(tries) >= needed).collect();
    let windows = is_full.windows(n_seconds * BINS_A_SECOND).enumerate();
    let is_refill = |at: usize| storm.seen.opened_by(BIN * at as u32) >= storm.bursts();
    windows.filter(|(at, bins)| is_refill(*at) && bins.iter().all(|is_full| *is_full)).map(|(at, _)| at).collect()
}

/// Admissions a second from the kill to the end of the last second of full demand, less the burst
/// that the buckets held; only where that is time enough for the difference to show.
fn sustained_rate(storm: &Storm, full: &[usize]) -> Option<f64> {
    let until = BIN * (*full.last()? as u32) + Duration::from_secs(1);
    let net = f64::from(storm.world.admitted.before(until)) - storm.bursts();
    (until >= Duration::from_secs(5)).then_some(net / until.as_secs_f64())
}

/// What the living say about it, and what it cost.
fn server(options: &Options, storm: &Storm, sheet: &mut Sheet) {
    let [_, before, after] = &storm.counters;
    let took = after.at - before.at;
    let metrics = after.metrics.since(&before.metrics);
    sheet.figure("refused_by_server", "refused, as the servers saw it", by_code(&metrics), "");
    let ms = |part| metrics.quantile("gateway_refusal_seconds", part).map(|s| s * 1e3);
    sheet.figure("refusal_p50_ms", "a refusal in the server, p50", ms(0.5), "ms");
    sheet.figure("refusal_p99_ms", "a refusal in the server, p99", ms(0.99), "ms");
    sheet.promise("a refusal in the server, p99", ms(0.99), Bound::AtMost(20.0), "ms");
    let auth = metrics.quantile("gateway_auth_seconds", 0.99).map(|s| s * 1e3);
    sheet.figure("auth_p99_ms", "an authentication, p99", auth, "ms");
    let redis = after.redis.since(&before.redis);
    let admitted = metrics.sum("gateway_sessions_opened_total").unwrap_or(0.0).max(1.0);
    let per_client = redis.of("mget") as f64 / admitted;
    sheet.figure("admitted", "admitted by the servers", admitted, "");
    sheet.figure("mget_per_client", "MGETs an admitted client", per_client, "");
    sheet.figure("redis_calls", "Redis commands, also in functions", redis.total(), &format!("({})", redis.text()));
    let bound = if options.open { 1.0 / 50.0 } else { 1.0 };
    sheet.promise("MGETs an admitted client", Some(per_client), Bound::AtMost(bound), "");
    let cores = |cpu: Duration| cpu.as_secs_f64() / took.as_secs_f64();
    sheet.figure("generator_cores", "CPU of this program", cores(after.own_cpu - before.own_cpu), "cores");
    let gateways = after.gateway_cpu.saturating_sub(before.gateway_cpu);
    sheet.figure("gateway_cores", "CPU of the living gateways", cores(gateways), "cores");
    sheet.figure("redis_cores", "CPU of Redis", redis.cpu_s / took.as_secs_f64(), "cores");
}

/// What the sessions that stayed felt, and what the probes said.
fn others(options: &Options, storm: &Storm, sheet: &mut Sheet) {
    let seen = &storm.seen;
    let ms = |histogram: &Histogram, part| histogram.quantile(part).map(|took| took.as_secs_f64() * 1e3);
    for (key, title, histogram, part) in [
        ("delivery_before_p50_ms", "delivery before, p50", &seen.before, 0.5),
        ("delivery_before_p99_ms", "delivery before, p99", &seen.before, 0.99),
        ("delivery_during_p50_ms", "delivery in the storm, p50", &seen.during, 0.5),
        ("delivery_during_p99_ms", "delivery in the storm, p99", &seen.during, 0.99),
        ("lag_before_p99_ms", "the machine's own lag before, p99", &seen.lag_before, 0.99),
        ("lag_during_p99_ms", "the machine's own lag in it, p99", &seen.lag_during, 0.99),
    ] {
        sheet.figure(key, title, ms(histogram, part), "ms");
    }
    let ratio = ms(&seen.during, 0.99).zip(ms(&seen.before, 0.99)).map(|(during, before)| during / before);
    let [begun, before, after] = &storm.counters;
    for (key, title, from, to) in [
        ("server_delivery_before_p99_ms", "as the servers saw it before, p99", begun, before),
        ("server_delivery_during_p99_ms", "as the servers saw it in it, p99", before, after),
    ] {
        // Their figure counts replayed events with their age, up to beyond its last bucket.
        let s = to.metrics.since(&from.metrics).quantile("gateway_delivery_seconds", 0.99);
        let unit = if s.is_some_and(f64::is_infinite) { "(beyond the last bucket)" } else { "ms" };
        sheet.figure(key, title, s.map(|s| s * 1e3), unit);
    }
    if options.open {
        // Nothing holds such a storm off; it is there to show what it costs Redis.
        sheet.figure("delivery_ratio", "delivery in the storm to before, p99", ratio, "times");
    } else {
        sheet.promise("delivery in the storm to before, p99", ratio, Bound::AtMost(2.0), "times");
    }
    let got = seen.delivery();
    sheet.figure("events", "events for those that stayed", got.n_published, "");
    sheet.promise("events lost by those that stayed", Some(got.n_lost as f64), Bound::AtMost(0.0), "");
    sheet.promise("events doubled or out of order", Some(got.n_doubled as f64), Bound::AtMost(0.0), "");
    sheet.promise("publishes that failed", Some(got.n_publish_failed as f64), Bound::AtMost(0.0), "");
    let ended = got.n_ended as f64 + f64::from(storm.world.n_lost_elsewhere.load(Ordering::Relaxed));
    sheet.promise("sessions of the living that ended", Some(ended), Bound::AtMost(0.0), "");
    for (word, probe) in [("livez", &seen.livez), ("readyz", &seen.readyz)] {
        let (asked, failed) = (probe.n_asked.load(Ordering::Relaxed), probe.n_failed.load(Ordering::Relaxed));
        let p99 = ms(&probe.took, 0.99);
        sheet.data(word, json!({"asked": asked, "failed": failed, "p99_ms": p99}));
        sheet.line(format!("{word}: asked {asked} times, p99 {:.1} ms", p99.unwrap_or(0.0)));
        sheet.promise(&format!("{word} failed"), Some(failed as f64), Bound::AtMost(0.0), "times");
    }
}

fn by_code(metrics: &Metrics) -> String {
    let counts = metrics.by("gateway_refused_total", "code");
    words(&counts.into_iter().map(|(code, n)| (code, n as u32)).collect())
}

fn words(counts: &BTreeMap<String, u32>) -> String {
    if counts.is_empty() {
        return "nobody".to_owned();
    }
    counts.iter().map(|(code, n)| format!("{code} {n}")).collect::<Vec<_>>().join(", ")
}
