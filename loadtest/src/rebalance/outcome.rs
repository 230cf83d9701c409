//! What the figures of a fleet that grew mean, and which bounds were kept.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use super::course::{NEAR, Row, budget_for, formula, most_of_budget, reached};
use super::watch::line;
use super::{Growth, Options};
use crate::probe::Metrics;
use crate::report::{Bound, Report, Sheet};

/// What the measured time may take of what the formula says.
const SLACK: f64 = 1.15;
/// From this coefficient of variation on a fleet is uneven.
const UNEVEN: f64 = 0.1;
/// One row in so many is shown to people.
const SHOWN: usize = 10;

pub fn judge(options: &Options, growth: &Growth) -> Report {
    let mut sheet = Sheet::new("rebalance");
    sheet.figure("balancer", "balancer", options.balancers.balancer.word(), "");
    sheet.figure("clients", "clients", options.clients, &format!("({})", options.transport.word()));
    sheet.figure("from", "gateways before", options.from, "");
    sheet.figure("to", "gateways after", options.to, "");
    sheet.figure("started_s", "new gateways were ready after", growth.started.as_secs_f64(), "s");
    for row in growth.rows.iter().step_by(SHOWN) {
        sheet.line(line(row));
    }
    sheet.data("course", growth.rows.iter().map(as_json).collect::<Vec<Value>>());
    pace(options, growth, &mut sheet);
    moves(options, growth, &mut sheet);
    delivery(growth, &mut sheet);
    cost(growth, &mut sheet);
    sheet.finish()
}

fn as_json(row: &Row) -> Value {
    json!({
        "at_s": row.at, "sessions": row.sessions, "cv": row.cv(), "budget": row.budget, "bound": row.bound,
        "state": row.state, "suspended": row.suspended,
    })
}

/// How soon every node had its share, and whether it kept it.
fn pace(options: &Options, growth: &Growth, sheet: &mut Sheet) {
    let rows = &growth.rows;
    let share = options.clients as f64 / options.to as f64;
    let n_new = (options.to - options.from) as f64;
    // The new nodes need so many to be within a tenth of their shares.
    let needed = n_new * (1.0 - NEAR) * share;
    let budget = budget_for(rows, needed);
    let t10 = reached(rows, share);
    sheet.figure("share", "share of a node", share, "sessions");
    sheet.figure("moves10", "moves until within 10 %, at least", needed, "");
    let most = rows.iter().map(|row| row.budget).fold(0.0, f64::max);
    sheet.figure("budget_max", "budget as /v1/fleet showed it, highest", most, "/s");
    sheet.figure("budget", "and as a mean over that time", budget, "/s");
    sheet.figure("bound", "bounded by", bounds(rows), "");
    let first = rows.iter().find(|row| row.state == "shedding").map(|row| row.at);
    sheet.figure("first_s", "the first sessions were moved after", first, "s");
    let says = budget.map(|budget| formula(needed, budget));
    sheet.figure("formula_s", "join grace + moves/B + J/2", says, "s");
    sheet.figure("t10_s", "every node within 10 % after", t10, "s");
    let even = rows.iter().find(|row| row.cv() < UNEVEN).map(|row| row.at);
    sheet.figure("cv_s", "cv below 0.1 after", even, "s");
    let bound = says.map_or(0.0, |says| SLACK * says);
    sheet.promise("every node within 10 %", t10.or(Some(f64::INFINITY)), Bound::AtMost(bound), "s");
    let after = t10.map(|t10| rows.iter().filter(|row| row.at >= t10).collect::<Vec<&Row>>()).unwrap_or_default();
    let worst = |of: &dyn Fn(&Row) -> f64| after.iter().map(|row| of(row)).reduce(f64::max);
    let held = after.last().zip(t10).map_or(0.0, |(last, t10)| last.at - t10);
    sheet.figure("held_s", "watched after that", held, "s");
    sheet.figure("farthest", "farthest from its share in it", worst(&|row| row.farthest(share)), "of the share");
    let cv = worst(&Row::cv).or(Some(f64::INFINITY));
    sheet.promise("cv by then and after", cv, Bound::AtMost(UNEVEN), "");
    sheet.figure("state", "in the end", rows.last().map(|row| row.state.clone()), "");
}

/// `donors 80 s, room 12 s`: while sessions were moved.
fn bounds(rows: &[Row]) -> String {
    let mut seconds: BTreeMap<&str, u32> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.state == "shedding") {
        *seconds.entry(&row.bound).or_default() += 1;
    }
    seconds.iter().map(|(bound, n)| format!("{bound} {n} s")).collect::<Vec<_>>().join(", ")
}

/// Who was moved, and how evenly they came back.
fn moves(options: &Options, growth: &Growth, sheet: &mut Sheet) {
    let world = &growth.world;
    let n_moves = world.sheds.before(Duration::MAX);
    let least = (options.to - options.from) as f64 * options.clients as f64 / options.to as f64;
    sheet.figure("moves", "sessions moved", n_moves, "");
    sheet.figure("moves_least", "the new nodes' shares together", least, "");
    sheet.figure("shed_by_servers", "moved, as the servers counted", growth.metrics.sum("gateway_shed_total"), "");
    let twice = world.records.iter().filter(|record| record.n_moves.load(Ordering::Relaxed) > 1).count();
    sheet.figure("moved_twice", "clients moved more than once", twice, "");
    let until = Duration::from_secs_f64(growth.rows.last().map_or(0.0, |row| row.at));
    let windows = world.reconnects.windows(10, until);
    let peak = windows.iter().max().map(|n| f64::from(*n) / 10.0);
    sheet.figure("reconnects_peak", "reconnects, highest mean of 10 s", peak, "/s");
    sheet.data("reconnects_per_s", world.reconnects.seconds());
    sheet.data("moves_per_s", world.sheds.seconds());
    let most_in_one = world.reconnects.windows(1, until).into_iter().max();
    sheet.figure("reconnects_peak_1s", "reconnects, highest second", most_in_one, "/s");
    sheet.promise("sessions moved", Some(f64::from(n_moves)), Bound::AtMost(1.05 * least), "");
    let ratio = most_of_budget(&windows, &growth.rows);
    sheet.promise("reconnects, mean of 10 s", ratio, Bound::AtMost(1.1), "of the budget then");
    sheet.figure("ends", "how sessions ended", words(&world.ends), "");
    sheet.figure("refused", "attempts that failed", words(&world.refused), "");
    sheet.figure("refused_by_servers", "refused, as the servers counted", by_code(&growth.metrics), "");
}

/// Whether anybody missed anything.
fn delivery(growth: &Growth, sheet: &mut Sheet) {
    let (world, published) = (&growth.world, growth.published);
    sheet.figure("events_common", "events for all", published.n_common, "");
    sheet.figure("events_own", "events for one", published.n_own, &format!("({} just moved)", published.n_moved));
    sheet.figure("repeated", "publishes repeated", published.n_repeated, "");
    sheet.promise("events lost", Some(f64::from(world.n_lost())), Bound::AtMost(0.0), "");
    sheet.promise("events doubled or out of order", Some(f64::from(world.n_doubled())), Bound::AtMost(0.0), "");
    let of = |count: &std::sync::atomic::AtomicU32| Some(f64::from(count.load(Ordering::Relaxed)));
    sheet.promise("gaps told", of(&world.n_gaps), Bound::AtMost(0.0), "");
    sheet.promise("reconnects without a resume", of(&world.n_unresumed), Bound::AtMost(0.0), "");
    let away = world.records.len() - world.n_open.load(Ordering::Relaxed).min(world.records.len());
    sheet.figure("away", "clients away in the end", away, "");
}

fn cost(growth: &Growth, sheet: &mut Sheet) {
    let cores = |cpu: Duration| cpu.as_secs_f64() / growth.took.as_secs_f64();
    sheet.figure("generator_cores", "CPU of this program", cores(growth.own_cpu), "cores");
    sheet.figure("gateway_cores", "CPU of the gateways", cores(growth.gateway_cpu), "cores");
}

fn words(counts: &Mutex<BTreeMap<String, u32>>) -> String {
    let counts = counts.lock().expect("nothing panics while it is held");
    let all: Vec<String> = counts.iter().map(|(word, n)| format!("{word} {n}")).collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}

fn by_code(metrics: &Metrics) -> String {
    let all: Vec<String> =
        metrics.by("gateway_refused_total", "code").into_iter().map(|(code, n)| format!("{code} {n}")).collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}
