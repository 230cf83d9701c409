//! What the reports say should be: shares by capacity, targets, who has too much, who may be given
//! some, and how many sessions a second the fleet may move. A function of one reading: every node
//! that reads the same comes to the same. Whether a reading can be believed is `calm`'s.

use std::sync::Arc;
use std::time::Duration;

use super::{BalanceConfig, Seen, View};
use crate::handle::Phase;

/// A node is given sessions only once it has been ready for so long: until then the balancer in
/// front may not send it anybody, and what is moved would come back.
const JOIN_GRACE: Duration = Duration::from_secs(15);

/// So near its target a node is left alone: donors stop, recipients are full. It is a part of the
/// targets of whichever side is smaller. (Twenty donors that each kept 1 % of their own would leave
/// one newcomer 20 % short; and one full node among twenty finds nobody who misses 1 %.)
///
/// Nobody sees whether a node is 1 % off, and everybody who is moved to mend that is cut off for up
/// to five seconds; so what remains is left to whoever comes and goes anyway. But it is a fourth of
/// the tolerance that starts the moving and no more: it should be even when it is over, not at the
/// edge of a band. Where the last of five nodes is empty after a deploy in place, 9,000 moves of
/// 50,000 sessions bring all within 10 %, 10,000 would make them equal, and this ends at 9,875.
const NEAR: f64 = 0.0125;
/// At most this part of the tolerance: else a smaller one would call for moves that nobody makes.
const NEAR_OF_TOLERANCE: f64 = 0.25;

/// Smaller gaps may be chance and are no imbalance: so many sessions, or three times the square root of the
/// target, which is what random placement alone makes of a few nodes.
const SMALLEST_GAP: f64 = 50.0;
const CHANCE: f64 = 3.0;

/// Clients that were told to leave return within 5 s, evenly: half of those of the last 5 s are on
/// their way.
pub(super) const ON_THEIR_WAY: f64 = 0.5;
/// Reports count over this time.
pub(super) const COUNTED: f64 = 5.0;

/// Of what the whole fleet can accept, so much may be ours to use.
const OF_THE_FLEET: f64 = 0.25;
/// Of what the recipients can accept: the other half is for those who come anyway.
const OF_THE_RECIPIENTS: f64 = 0.5;
/// The recipients' room is not filled faster than in this time.
const FILL: f64 = 2.0;
/// Nor do donors part with what they have too much faster than in this time, in which clients return:
/// so the last ones leave slowly. How far counts of different ages, and the guess of how many are on
/// their way, are off is a matter of how fast it goes, and donors that came to their end at full
/// speed would go beyond it.
const EASE: f64 = 5.0;
/// Least-connections sends everybody to the emptiest node until it is as full as the next. Nodes
/// count as reached together if that takes them no longer than this; reports of nodes that fill
/// evenly are so many seconds apart.
const REACHED_WITHIN: f64 = 6.0;

/// `GATEWAY_ACCEPT_RATE` is this at most.
const MOST_ACCEPTED: f64 = 1e6;

/// What a node is to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Starting, leaving, silent, or without capacity: neither counted nor given anything.
    Away,
    /// Holds more than its target.
    Donor,
    /// Holds less than its target, and may be given some.
    Recipient,
    /// Holds about its target, or cannot be given any yet.
    Settled,
}

impl Role {
    /// The word in `/v1/fleet`.
    pub fn word(self) -> &'static str {
        match self {
            Role::Away => "away",
            Role::Donor => "donor",
            Role::Recipient => "recipient",
            Role::Settled => "settled",
        }
    }
}

/// One node in the plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    /// Its name.
    pub node: Arc<str>,
    /// Sessions that it reported.
    pub n_sessions: usize,
    /// Its part of the capacity of all that serve, 0 to 1.
    pub share: f64,
    /// Sessions that it should hold.
    pub target: f64,
    /// What it is to the others.
    pub role: Role,
}

/// What bounds the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A quarter of what all that serve accept.
    Fleet,
    /// Half of what those accept to which the moved clients will be sent; 0: there is nobody.
    Recipients,
    /// What the donors may part with in an interval.
    Donors,
    /// What is missing on the recipients, or what donors still have too much.
    Room,
}

impl Bound {
    /// The word in `/v1/fleet`.
    pub fn word(self) -> &'static str {
        match self {
            Bound::Fleet => "fleet",
            Bound::Recipients => "recipients",
            Bound::Donors => "donors",
            Bound::Room => "room",
        }
    }
}

/// How many sessions a second all nodes together may move to even out the fleet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Sessions a second; what is recycled anyway is taken off already.
    pub per_second: f64,
    /// Which of the bounds it is.
    pub bound: Bound,
}

/// The fleet as it should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Every node that was seen.
    pub places: Vec<Place>,
    /// Sessions of all that serve, with those on their way.
    pub total: f64,
    /// Sessions that were moved and have not come back yet, by estimate.
    pub in_flight: f64,
    /// Coefficient of variation of how full the nodes are.
    pub cv: f64,
    /// The fullest node's distance from its target, as a part of it.
    pub highest: f64,
    /// The emptiest recipient's, 0 to 1; 0: there is none below.
    pub lowest: f64,
    /// What all may move.
    pub budget: Budget,
    /// This node's part of it, sessions a second, before its own cap.
    pub own_per_second: f64,
    /// Donors stop at this part above their targets.
    pub(super) stop: f64,
    /// Closed for shedding by all that serve, a second.
    pub(super) shed_rate: f64,
    /// A node is off by more than the tolerance, but by so few sessions that it may be chance.
    pub(super) is_off_by_few: bool,
    is_uneven: bool,
}

impl Plan {
    /// Does a node stand out by more than the tolerance, and by more than chance?
    pub fn is_uneven(&self) -> bool {
        self.is_uneven
    }

    /// Is there anybody to give to?
    pub fn has_recipient(&self) -> bool {
        self.places.iter().any(|place| place.role == Role::Recipient)
    }

    /// Nodes that count.
    pub fn n_live(&self) -> usize {
        self.places.iter().filter(|place| place.role != Role::Away).count()
    }

    /// The node's target if nobody was on the way: what is known, where the rest is a guess.
    pub(super) fn landed(&self, place: &Place) -> f64 {
        place.target - place.share * self.in_flight
    }

    pub(super) fn of(view: &View, own: &str, config: &BalanceConfig) -> Self {
        let live: Vec<&Seen> = view.nodes.iter().filter(|seen| is_live(seen, config)).collect();
        let in_flight = on_their_way(&live);
        let total = live.iter().map(|seen| seen.n_sessions as f64).sum::<f64>() + in_flight;
        let capacity: f64 = live.iter().map(|seen| seen.capacity as f64).sum();
        let mut rows: Vec<Row> = live.iter().map(|seen| Row::new(seen, total, capacity)).collect();
        let (stop, full) = edges(&rows, NEAR.min(NEAR_OF_TOLERANCE * config.tolerance));
        for row in &mut rows {
            row.excess = (row.n() - row.target * (1.0 + stop)).max(0.0);
            row.has_room = row.n() < row.target * (1.0 - full);
        }
        let budget = budget(&rows, config);
        let excess: f64 = rows.iter().map(|row| row.excess).sum();
        let mine = rows.iter().find(|row| &*row.seen.node == own).map_or(0.0, |row| row.excess);
        let recipients = || rows.iter().filter(|row| row.may_receive);
        let is_uneven = rows.iter().any(|row| row.stands_out(config.tolerance));
        Self {
            places: view.nodes.iter().map(|seen| place(seen, &rows)).collect(),
            total,
            in_flight,
            cv: cv(&rows),
            highest: rows.iter().map(|row| row.off()).fold(0.0, f64::max),
            lowest: recipients().map(|row| -row.off()).fold(0.0, f64::max),
            budget,
            own_per_second: if excess > 0.0 { budget.per_second * mine / excess } else { 0.0 },
            stop,
            shed_rate: live.iter().map(|seen| seen.moved.shed as f64).sum::<f64>() / COUNTED,
            is_off_by_few: !is_uneven && rows.iter().any(|row| row.is_off(config.tolerance)),
            is_uneven,
        }
    }
}

/// Is the report one that a node can have written? Counts that cannot be are no counts.
pub(crate) fn is_sane(seen: &Seen) -> bool {
    // A node may be over its capacity, lowered under it; not by this much.
    let most = seen.capacity.saturating_mul(10).max(1_000);
    let accepts = 0.0..=MOST_ACCEPTED;
    seen.n_sessions <= most && seen.capacity <= 100_000_000 && accepts.contains(&seen.accept_rate)
}

/// Young enough to be believed.
pub(super) fn is_fresh(seen: &Seen, config: &BalanceConfig) -> bool {
    is_sane(seen) && seen.age <= config.fresh()
}

pub(super) fn is_live(seen: &Seen, config: &BalanceConfig) -> bool {
    is_fresh(seen, config) && seen.phase == Some(Phase::Serving) && seen.capacity > 0
}

pub(super) fn on_their_way(nodes: &[&Seen]) -> f64 {
    ON_THEIR_WAY * nodes.iter().map(|seen| seen.moved.all() as f64).sum::<f64>()
}

struct Row<'a> {
    seen: &'a Seen,
    share: f64,
    target: f64,
    /// Ready for long enough, refuses nobody, is not late.
    may_receive: bool,
    /// Beyond where it should stop.
    excess: f64,
    has_room: bool,
}

impl<'a> Row<'a> {
    fn new(seen: &'a Seen, total: f64, capacity: f64) -> Self {
        let share = seen.capacity as f64 / capacity;
        let is_known = seen.ready_for.is_some_and(|ready| ready >= JOIN_GRACE);
        let may_receive = is_known && seen.n_refused == 0 && !seen.is_lagging;
        Self { seen, share, target: share * total, may_receive, excess: 0.0, has_room: false }
    }

    fn n(&self) -> f64 {
        self.seen.n_sessions as f64
    }

    /// How full it is, 0 to 1.
    fn level(&self) -> f64 {
        self.n() / self.seen.capacity as f64
    }

    /// Distance from the target as a part of it.
    fn off(&self) -> f64 {
        if self.target > 0.0 { self.n() / self.target - 1.0 } else { 0.0 }
    }

    fn stands_out(&self, tolerance: f64) -> bool {
        self.is_off_by(SMALLEST_GAP.max(CHANCE * self.target.sqrt()).max(tolerance * self.target))
    }

    /// By the tolerance alone, and by a whole session.
    fn is_off(&self, tolerance: f64) -> bool {
        self.is_off_by((tolerance * self.target).max(1.0))
    }

    fn is_off_by(&self, least: f64) -> bool {
        let above = self.n() - self.target;
        above > least || (self.may_receive && -above > least)
    }

    fn is_recipient(&self) -> bool {
        self.may_receive && self.has_room
    }
}

/// Where donors stop above, and recipients below their targets, as parts of them.
fn edges(rows: &[Row], near: f64) -> (f64, f64) {
    let sum = |keep: &dyn Fn(&Row) -> bool| rows.iter().filter(|row| keep(row)).map(|row| row.target).sum::<f64>();
    let edge = |few: f64, many: f64| if few > 0.0 && many > 0.0 { near * (few / many).min(1.0) } else { near };
    let stop = edge(sum(&|row| row.may_receive && row.off() < -near), sum(&|row| row.off() > 0.0));
    let full = edge(sum(&|row| row.off() > near), sum(&|row| row.may_receive && row.off() < 0.0));
    (stop, full)
}

fn place(seen: &Seen, rows: &[Row]) -> Place {
    let row = rows.iter().find(|row| std::ptr::eq(row.seen, seen));
    let role = match row {
        None => Role::Away,
        Some(row) if row.excess > 0.0 => Role::Donor,
        Some(row) if row.is_recipient() => Role::Recipient,
        Some(_) => Role::Settled,
    };
    let (share, target) = row.map_or((0.0, 0.0), |row| (row.share, row.target));
    Place { node: seen.node.clone(), n_sessions: seen.n_sessions, share, target, role }
}

fn budget(rows: &[Row], config: &BalanceConfig) -> Budget {
    let accept = |row: &Row| row.seen.accept_rate;
    let room: f64 = rows.iter().filter(|row| row.may_receive).map(|row| (row.target - row.n()).max(0.0)).sum();
    let excess: f64 = rows.iter().map(|row| row.excess).sum();
    let parted = |keep: fn(&Row) -> bool| {
        let caps = rows.iter().filter(|row| keep(row)).map(|row| config.own_cap(row.seen.n_sessions) as f64);
        caps.sum::<f64>() / config.interval.as_secs_f64()
    };
    let of_donors = if excess > 0.0 { parted(|row| row.excess > 0.0) } else { parted(|_| true) };
    let bounds = [
        (OF_THE_RECIPIENTS * reachable(rows), Bound::Recipients),
        (OF_THE_FLEET * rows.iter().map(accept).sum::<f64>(), Bound::Fleet),
        (of_donors, Bound::Donors),
        (if excess > 0.0 { (room / FILL).min(excess / EASE) } else { room / FILL }, Bound::Room),
    ];
    let least = bounds.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).expect("there are four");
    let recycled = rows.iter().map(|row| row.seen.moved.recycled as f64).sum::<f64>() / COUNTED;
    // Recycling is put behind shedding, so it never stops it altogether.
    Budget { per_second: (least.0 - recycled).max(least.0.min(1.0)), bound: least.1 }
}

/// What those accept a second to whom a least-connections balancer would send the next clients.
/// One that is young is among them, for it may be sent to already; one that refuses or is late
/// attracts clients and accepts none of ours.
fn reachable(rows: &[Row]) -> f64 {
    if !rows.iter().any(Row::is_recipient) {
        return 0.0;
    }
    let mut low: Vec<&Row> = rows.iter().filter(|row| row.seen.ready_for.is_some() && row.has_room).collect();
    low.sort_by(|a, b| a.level().total_cmp(&b.level()));
    let mut accepted = 0.0;
    for (i, row) in low.iter().enumerate() {
        let missing: f64 =
            low[..i].iter().map(|lower| (row.level() - lower.level()) * lower.seen.capacity as f64).sum();
        if missing > REACHED_WITHIN * accepted {
            break;
        }
        let takes_ours = row.seen.n_refused == 0 && !row.seen.is_lagging;
        accepted += if takes_ours { row.seen.accept_rate } else { 0.0 };
    }
    accepted
}

fn cv(rows: &[Row]) -> f64 {
    let n = rows.len().max(1) as f64;
    let mean = rows.iter().map(Row::level).sum::<f64>() / n;
    if mean <= 0.0 {
        return 0.0;
    }
    let variance = rows.iter().map(|row| (row.level() - mean).powi(2)).sum::<f64>() / n;
    variance.sqrt() / mean
}
