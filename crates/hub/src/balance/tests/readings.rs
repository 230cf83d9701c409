//! What single readings of the fleet lead to: shares, bounds, every reason to wait, and nonsense.

use std::collections::BTreeSet;

use super::super::*;
use super::sim::{CONFIG, s};

/// A node that serves and has served for long.
fn seen(name: &str, n: usize) -> Seen {
    Seen {
        node: name.into(),
        boot: "1".into(),
        version: "1".into(),
        phase: Some(Phase::Serving),
        age: s(1),
        n_sessions: n,
        capacity: 40_000,
        accept_rate: 100.0,
        ready_for: Some(s(1_000)),
        is_lagging: false,
        moved: Moved::default(),
        n_opened: 0,
        n_refused: 0,
    }
}

fn nodes(counts: &[usize]) -> Vec<Seen> {
    counts.iter().enumerate().map(|(i, n)| seen(&format!("n{i}"), *n)).collect()
}

fn view(nodes: Vec<Seen>) -> View {
    View { nodes, ..View::default() }
}

fn plan(nodes: Vec<Seen>) -> Plan {
    Plan::of(&view(nodes), "n0", &CONFIG)
}

/// The first node of a fleet, which reads it anew every second and only counts what it should move.
struct First {
    now: Instant,
    balancer: Balancer,
    view: View,
    n_shed: u64,
}

impl First {
    /// Has known this fleet for 40 s.
    fn of(nodes: Vec<Seen>) -> Self {
        let balancer = Balancer::new(CONFIG, "n0".into(), Dice::seeded(5));
        let mut first = Self { now: Instant::now() + s(100_000), balancer, view: view(nodes), n_shed: 0 };
        first.tick(40);
        first
    }

    fn tick(&mut self, seconds: u64) -> Orders {
        (0..seconds).map(|_| self.tick_after(s(1))).last().expect("at least one")
    }

    fn tick_after(&mut self, span: Duration) -> Orders {
        self.now += span;
        if self.view.failing_since.is_none() {
            self.view.read_at = Some(self.now);
        }
        let n_sessions = self.view.nodes.iter().find(|seen| &*seen.node == "n0").map_or(0, |seen| seen.n_sessions);
        let orders = self.balancer.tick(self.now, &self.view, &Own { n_sessions, n_shed: 0 });
        self.n_shed += orders.n_to_shed as u64;
        orders
    }

    /// Seconds until it no longer says so.
    fn says_for(&mut self, reason: ShedSuspension) -> u64 {
        let says = |orders: Orders| orders.state.reasons().contains(&reason);
        (1..10_000).find(|_| !says(self.tick(1))).expect("it ends")
    }
}

/// Half a fleet over, half under.
fn uneven() -> Vec<Seen> {
    nodes(&[6_000, 6_000, 4_000, 4_000])
}

#[test]
fn shares_follow_capacity_and_sessions_on_their_way_count() {
    let mut fleet = nodes(&[500, 500, 500]);
    for (node, capacity) in fleet.iter_mut().zip([1_000, 2_000, 4_000]) {
        node.capacity = capacity;
    }
    fleet[0].moved = Moved { shed: 100, recycled: 60, drained: 40 };
    let plan = plan(fleet);
    assert_eq!((plan.total, plan.in_flight), (1_600.0, 100.0));
    let targets: Vec<u64> = plan.places.iter().map(|place| place.target.round() as u64).collect();
    assert_eq!(targets, [229, 457, 914]);
    assert_eq!(
        plan.places.iter().map(|place| place.role).collect::<Vec<_>>(),
        [Role::Donor, Role::Donor, Role::Recipient]
    );
}

#[test]
fn whoever_does_not_serve_is_not_counted() {
    let away: [fn(&mut Seen); 7] = [
        |n| n.phase = Some(Phase::Starting),
        |n| n.phase = Some(Phase::Draining),
        |n| n.phase = None,
        |n| n.age = s(16),
        |n| n.capacity = 0,
        |n| n.n_sessions = 1_000_000_000_000,
        |n| n.accept_rate = f64::NAN,
    ];
    for change in away {
        let mut fleet = nodes(&[1_000, 1_000, 1_000]);
        change(&mut fleet[2]);
        let plan = plan(fleet);
        assert_eq!((plan.total, plan.places[2].role, plan.places[2].target), (2_000.0, Role::Away, 0.0));
    }
    let mut fleet = nodes(&[1_000, 1_000, 1_000]);
    fleet[2].age = s(15);
    assert_eq!(plan(fleet).total, 3_000.0);
}

#[test]
fn only_who_is_ready_for_15_s_refuses_nobody_and_is_not_late_is_given_any() {
    type Change = fn(&mut Seen);
    let cases: [(Change, bool); 6] = [
        (|_| {}, true),
        (|n| n.ready_for = Some(s(15)), true),
        (|n| n.ready_for = Some(s(14)), false),
        (|n| n.ready_for = None, false),
        (|n| n.n_refused = 1, false),
        (|n| n.is_lagging = true, false),
    ];
    for (change, may_receive) in cases {
        let mut fleet = nodes(&[1_000, 1_000, 0]);
        change(&mut fleet[2]);
        let plan = plan(fleet);
        assert_eq!(plan.has_recipient(), may_receive);
        assert_eq!(plan.budget.per_second > 0.0, may_receive, "{:?}", plan.budget);
        assert_eq!(plan.total, 2_000.0, "it has its target at once");
    }
}

#[test]
fn a_node_stands_out_beyond_5_percent_and_beyond_chance() {
    for (counts, is_uneven) in [
        (&[10_500, 10_000, 9_500][..], false),
        (&[10_501, 10_000, 9_499], true),
        // Too many here, a little too few everywhere else; and the other way round.
        (&[10_600, 9_900, 9_900, 9_900, 9_900], true),
        (&[9_400, 10_100, 10_100, 10_100, 10_100], true),
        // Fifty sessions, and three times the root of 1,000, are chance.
        (&[150, 50], false),
        (&[151, 49], true),
        (&[1_094, 906], false),
        (&[1_095, 905], true),
        (&[0, 0], false),
        (&[7], false),
    ] {
        assert_eq!(plan(nodes(counts)).is_uneven(), is_uneven, "{counts:?}");
    }
}

#[test]
fn the_budget_is_the_least_of_what_fleet_recipients_donors_and_room_bear() {
    let budget = |fleet: Vec<Seen>| {
        let budget = plan(fleet).budget;
        (budget.per_second, budget.bound)
    };
    // Two recipients that accept 100 each: half of it.
    assert_eq!(budget(nodes(&[20_000, 20_000, 20_000, 20_000, 0, 0])), (100.0, Bound::Recipients));
    // One donor and many recipients: a quarter of all 5 × 100 is less than half of 4 × 100.
    assert_eq!(budget(nodes(&[38_000, 0, 0, 0, 0])), (125.0, Bound::Fleet));
    // Half a percent a second of what the donors hold.
    assert_eq!(budget(nodes(&[2_000, 0, 0])), (10.0, Bound::Donors));
    // 33 are too many on each of three.
    let (per_second, bound) = budget(nodes(&[4_100, 4_100, 4_100, 3_900]));
    assert!((per_second - 3.0 * 33.125 / 5.0).abs() < 1e-6 && bound == Bound::Room, "{per_second}");
    // Nobody to give to.
    assert_eq!(budget(nodes(&[4_000])), (0.0, Bound::Recipients));
    // What is recycled is taken off, but never all.
    let mut fleet = nodes(&[20_000, 20_000, 20_000, 20_000, 0, 0]);
    fleet[0].moved.recycled = 100;
    assert_eq!(budget(fleet.clone()), (80.0, Bound::Recipients));
    fleet[0].moved.recycled = 10_000;
    assert_eq!(budget(fleet), (1.0, Bound::Recipients));
}

#[test]
fn only_the_emptiest_count_for_they_are_sent_everybody() {
    let rate = |counts: &[usize]| plan(nodes(counts)).budget.per_second;
    let full = [20_000; 8];
    assert_eq!(rate(&[&full[..], &[0, 0, 0]].concat()), 150.0);
    assert_eq!(rate(&[&full[..], &[0, 600, 600]].concat()), 150.0, "reached within 6 s");
    assert_eq!(rate(&[&full[..], &[0, 601, 601]].concat()), 50.0);
    // A newcomer may be sent all of them before it counts; one that refuses takes none of ours.
    let mut fleet = nodes(&[&full[..], &[0, 5_000, 5_000]].concat());
    fleet[8].ready_for = Some(s(1));
    assert_eq!(plan(fleet.clone()).budget.per_second, 50.0);
    fleet[8].n_refused = 1;
    assert_eq!(plan(fleet.clone()).budget.per_second, 0.0);
    // One that is not even ready is sent nobody.
    (fleet[8].ready_for, fleet[8].n_refused) = (None, 0);
    assert_eq!(plan(fleet).budget.per_second, 100.0);
}

#[test]
fn donors_divide_the_budget_by_what_they_have_too_much() {
    let plan = plan(nodes(&[8_000, 6_000, 0, 0]));
    let of_n1 = Plan::of(&view(nodes(&[8_000, 6_000, 0, 0])), "n1", &CONFIG);
    let (a, b) = (plan.own_per_second, of_n1.own_per_second);
    assert!((a + b - plan.budget.per_second).abs() < 1e-9);
    // 4,500 and 2,500 beyond 3,500, less the 1.25 % that they keep.
    assert!((a / b - 4_456.25 / 2_456.25).abs() < 1e-9, "{a} {b}");
}

#[test]
fn two_readings_must_show_it_and_repeated_looks_at_one_do_not_count() {
    let mut first = First::of(nodes(&[5_000, 5_000, 5_000, 5_000]));
    assert_eq!(first.tick(1).state, State::Idle);
    first.view.nodes = uneven();
    let own = Own { n_sessions: 6_000, n_shed: 0 };
    let at = first.now;
    first.view.read_at = Some(at + s(1));
    for i in 1..20 {
        assert_eq!(first.balancer.tick(at + s(i), &first.view, &own).state, State::Idle);
    }
    first.view.read_at = Some(at + s(20));
    assert_eq!(first.balancer.tick(at + s(20), &first.view, &own).state, State::Shedding);
}

#[test]
fn it_goes_on_to_1_and_a_quarter_percent_and_the_emptier_ones_only_watch() {
    let mut first = First::of(uneven());
    assert_eq!(first.tick(1).state, State::Shedding);
    for node in [5_080, 5_064] {
        first.view.nodes = nodes(&[node, 5_060, 4_930, 4_930]);
        assert_eq!(first.tick(3).state, State::Shedding, "{node}");
    }
    first.view.nodes = nodes(&[5_055, 5_060, 4_930, 4_930]);
    assert_eq!(first.tick(1).state, State::Idle);
    first.view.nodes = nodes(&[5_200, 5_060, 4_930, 4_930]);
    assert_eq!(first.tick(10).state, State::Idle, "only 5 % start it again");

    let mut low = First::of(nodes(&[4_000, 6_000]));
    assert_eq!(low.tick(1).state, State::Armed);
    let mut even = First::of(nodes(&[5_000, 6_000, 4_000]));
    assert_eq!(even.tick(1).state, State::Armed);
}

#[test]
fn a_tolerance_of_1_percent_is_kept_to() {
    let config = BalanceConfig { tolerance: 0.01, ..CONFIG };
    let of = |counts: &[usize]| Plan::of(&view(nodes(counts)), "n0", &config);
    // 1,000 of 100,000; smaller nodes may be off by so much by chance.
    let uneven = of(&[101_010, 101_010, 98_990, 98_990]);
    assert!(uneven.is_uneven() && uneven.has_recipient() && uneven.own_per_second > 0.0, "{uneven:?}");
    let nearly = of(&[100_270, 100_270, 99_730, 99_730]);
    assert!(!nearly.is_uneven() && nearly.own_per_second > 0.0, "once begun it goes on to a quarter of it: {nearly:?}");
    assert_eq!(of(&[100_240, 100_240, 99_760, 99_760]).own_per_second, 0.0);
}

#[test]
fn fewer_than_two_nodes_or_no_recipient_move_nobody() {
    assert_eq!(First::of(nodes(&[6_000])).n_shed, 0);
    let mut fleet = uneven();
    for node in &mut fleet[2..] {
        node.ready_for = None;
    }
    let mut first = First::of(fleet);
    assert_eq!((first.tick(1).state, first.n_shed), (State::Armed, 0));
}

#[test]
fn why_nobody_is_moved_is_always_said() {
    type Fleet = Vec<Seen>;
    let not_ready = |mut fleet: Fleet| {
        fleet[2..].iter_mut().for_each(|node| node.ready_for = None);
        fleet
    };
    for (fleet, state, rest) in [
        (nodes(&[5_000, 5_000, 5_000, 5_000]), State::Idle, Some(Rest::Even)),
        (nodes(&[0, 0]), State::Idle, Some(Rest::Even)),
        (nodes(&[100, 0]), State::Idle, Some(Rest::BelowMinimum)),
        (nodes(&[2, 0]), State::Idle, Some(Rest::Even)),
        (nodes(&[3, 0]), State::Idle, Some(Rest::BelowMinimum)),
        (nodes(&[6_000]), State::Idle, Some(Rest::Alone)),
        (nodes(&[4_000, 6_000]), State::Armed, Some(Rest::NoExcess)),
        (not_ready(uneven()), State::Armed, Some(Rest::NoRecipient)),
        (uneven(), State::Shedding, None),
    ] {
        let orders = First::of(fleet).tick(1);
        assert_eq!((orders.state, orders.rest), (state, rest), "{:?}", orders.plan.places);
    }
    let mut first = First::of(nodes(&[5_000, 5_000, 5_000, 5_000]));
    first.view.nodes = uneven();
    let orders = first.tick(1);
    assert_eq!((orders.state, orders.rest), (State::Idle, Some(Rest::SeenOnce)));
    let mut first = First::of(nodes(&[4_990, 5_000, 5_000, 5_010]));
    first.view.nodes = uneven();
    let orders = first.tick(10);
    assert_eq!((orders.state, orders.rest), (State::Armed, Some(Rest::BelowLately)));
    first.view.is_held = true;
    assert_eq!(first.tick(1).rest, None, "the hold says it");
}

#[test]
fn a_donor_that_others_way_back_alone_brings_to_its_target_waits_and_goes_on() {
    let mut first = First::of(uneven());
    assert_eq!(first.tick(1).state, State::Shedding);
    // 640 were moved in five seconds, half of them is taken to be on its way: 5,000 would be right.
    let mut fleet = nodes(&[5_040, 5_040, 4_800, 4_800]);
    fleet[..2].iter_mut().for_each(|node| node.moved.shed = 320);
    first.view.nodes = fleet;
    let n = first.n_shed;
    let orders = first.tick(3);
    assert_eq!((orders.state, orders.rest, first.n_shed), (State::Shedding, Some(Rest::OnTheirWay), n));
    // None of them was, they are simply gone: 4,920 is right, a gap that by itself starts nothing.
    first.view.nodes = nodes(&[5_040, 5_040, 4_800, 4_800]);
    assert!(!first.tick(1).plan.is_uneven());
    assert!(first.n_shed > n);
    // All of them were.
    first.view.nodes = nodes(&[5_040, 5_040, 4_960, 4_960]);
    let orders = first.tick(1);
    assert_eq!((orders.state, orders.rest), (State::Idle, Some(Rest::Even)));
    first.view.nodes = nodes(&[5_040, 5_040, 4_800, 4_800]);
    assert_eq!(first.tick(5).state, State::Idle, "once it is over, only 5 % start it again");
}

#[test]
fn a_node_that_was_below_its_target_moves_nobody_for_24_reports() {
    let mut first = First::of(nodes(&[4_990, 5_000, 5_000, 5_010]));
    first.view.nodes = uneven();
    first.tick(119);
    assert_eq!(first.n_shed, 0);
    first.tick(10);
    assert!(first.n_shed > 0);
    // A newcomer lowers all targets: what was too little may be too much now.
    let mut first = First::of(nodes(&[4_990, 5_000, 5_000, 5_010]));
    first.view.nodes.push(seen("n4", 0));
    first.tick(3);
    assert!(first.n_shed > 0);
}

#[test]
fn no_interval_exceeds_its_part_and_late_ticks_make_up_for_nothing() {
    let mut first = First::of(nodes(&[10_000, 0, 0, 0, 0, 0, 0, 0]));
    let mut last = VecDeque::from([0; 5]);
    for _ in 0..60 {
        let orders = first.tick(1);
        last.pop_front();
        last.push_back(orders.n_to_shed);
        assert!(last.iter().sum::<usize>() <= 250, "{last:?}");
        assert!(orders.n_to_shed >= 40, "50 a second: {orders:?}");
    }
    assert!(first.tick_after(s(60)).n_to_shed <= 101, "two seconds' worth");
    assert_eq!(first.tick_after(s(0)).n_to_shed, 0);
}

#[test]
fn a_second_that_is_woken_a_little_early_has_its_portion_all_the_same() {
    let mut first = First::of(nodes(&[10_000, 0, 0, 0, 0, 0, 0, 0]));
    let n_before = first.n_shed;
    for i in 0..300 {
        // Late by 0 to 10 ms, and not the same five seconds on.
        let late = |i: u64| Duration::from_millis(i * 7 % 11);
        assert!(first.tick_after(s(1) + late(i + 1) - late(i)).n_to_shed <= 51);
    }
    assert!(first.n_shed - n_before >= 14_900, "{} of 15,000", first.n_shed - n_before);
}

#[test]
fn a_small_node_moves_one_at_a_time() {
    let mut first = First::of(nodes(&[102, 0]));
    let n_before = first.n_shed;
    for _ in 0..50 {
        assert!(first.tick(1).n_to_shed <= 1);
    }
    assert_eq!(first.n_shed - n_before, 20, "two in five seconds");
}

#[test]
fn every_reason_to_wait_lasts_as_long_as_it_should() {
    use ShedSuspension::*;
    type Change = fn(&mut View);
    let cases: [(ShedSuspension, u64, Change); 7] = [
        (Hold, 1, |v| v.is_held = true),
        (Draining, 1, |v| v.nodes[3].phase = Some(Phase::Draining)),
        (Deploy, 60, |v| v.nodes[3].version = "2".into()),
        (Unsettled, 60, |v| drop(v.nodes.pop())),
        (Unsettled, 31, |v| v.nodes[3].n_sessions += 1_100),
        (Refusing, 10, |v| (v.nodes[3].n_refused, v.nodes[3].n_opened) = (2, 197)),
        (Stale, 1, |v| v.n_unreadable = 2),
    ];
    for (reason, seconds, change) in cases {
        let mut first = First::of(uneven());
        assert_eq!(first.tick(1).state, State::Shedding);
        let (calm, n) = (first.view.clone(), first.n_shed);
        change(&mut first.view);
        let orders = first.tick(1);
        assert!(orders.state.reasons().contains(&reason), "{reason:?}: {:?}", orders.state);
        assert_eq!((orders.state.word(), orders.n_to_shed), ("suspended", 0));
        if reason != Unsettled {
            first.tick(20);
        }
        assert_eq!(first.n_shed, n, "{reason:?}");
        first.view = calm;
        assert_eq!(first.says_for(reason), seconds, "{reason:?}");
    }
}

#[test]
fn a_log_that_is_new_stops_it_for_60_s_even_where_all_reports_are_there_again() {
    let mut first = First::of(uneven());
    assert_eq!(first.tick(1).state, State::Shedding);
    let n = first.n_shed;
    first.view.birth_ms = Some(1);
    first.tick(5);
    assert!(first.n_shed > n, "the first that is known of is not another one");
    let n = first.n_shed;
    first.view.birth_ms = Some(2);
    assert_eq!(first.tick(1).state, State::Suspended(vec![ShedSuspension::Unsettled]));
    first.tick(50);
    assert_eq!(first.n_shed, n);
    assert_eq!(first.says_for(ShedSuspension::Unsettled), 10);
}

#[test]
fn what_stays_below_the_bounds_is_no_reason_to_wait() {
    let changes: [fn(&mut View); 4] = [
        |v| (v.nodes[1].n_refused, v.nodes[1].n_opened) = (1, 99),
        |v| v.nodes[3].n_sessions += 900,
        |v| v.n_unreadable = 1,
        |v| v.nodes[3].age = s(15),
    ];
    for change in changes {
        let mut first = First::of(uneven());
        change(&mut first.view);
        assert_eq!(first.tick(5).state, State::Shedding);
    }
}

#[test]
fn a_backplane_that_fails_is_trusted_again_after_two_readings_and_30_to_60_s() {
    let mut ends = BTreeSet::new();
    for seed in 0..20 {
        let mut first = First::of(uneven());
        first.balancer.dice = Dice::seeded(seed);
        first.balancer.calm = calm::Calm::new(Dice::seeded(seed));
        first.tick(40);
        let n = first.n_shed;
        first.view.failing_since = Some(first.now);
        assert_eq!(first.tick(1).state, State::Suspended(vec![ShedSuspension::Backplane]));
        first.tick(5);
        assert_eq!(first.n_shed, n);
        first.view.failing_since = None;
        let seconds = first.says_for(ShedSuspension::Backplane);
        assert!((32..=63).contains(&seconds), "{seconds}");
        ends.insert(seconds);
    }
    assert!(ends.len() > 8, "not all at once: {ends:?}");
}

#[test]
fn versions_that_stay_mixed_for_a_day_are_reported_and_no_longer_waited_for() {
    let mut fleet = uneven();
    fleet[3].version = "2".into();
    let mut first = First::of(fleet);
    for _ in 0..24 * 60 - 1 {
        let orders = first.tick_after(s(60));
        assert_eq!((orders.state, orders.warning), (State::Suspended(vec![ShedSuspension::Deploy]), None));
    }
    let orders = first.tick_after(s(120));
    assert_eq!((orders.state, orders.warning), (State::Shedding, Some(Warning::MixedVersions)));
    // The deploy goes on and ends: the next one is a new one.
    first.view.nodes[3].version = "1".into();
    assert_eq!(first.tick(61).warning, None);
    first.view.nodes[3].version = "3".into();
    assert_eq!(first.tick(1).state, State::Suspended(vec![ShedSuspension::Deploy]));
}

#[test]
fn a_report_of_its_own_that_is_missing_or_old_moves_nobody() {
    for change in [|v: &mut View| drop(v.nodes.remove(0)), |v: &mut View| v.nodes[0].age = s(16)] {
        let mut first = First::of(uneven());
        let n = first.n_shed;
        change(&mut first.view);
        first.tick(20);
        assert_eq!(first.n_shed, n);
        assert!(first.tick(1).state.reasons().contains(&ShedSuspension::Stale));
    }
}

#[test]
fn whoever_is_short_of_sessions_in_an_uneven_fleet_keeps_them_longer() {
    let advice = |counts: &[usize]| First::of(nodes(counts)).tick(1).recycling;
    assert_eq!(advice(&[2_000, 5_000, 5_000]), Recycling::Extend);
    assert_eq!(advice(&[5_000, 2_000, 5_000]), Recycling::AsDrawn);
    // Short, but the fleet is even.
    assert_eq!(advice(&[4_700, 5_050, 5_050, 5_050]), Recycling::AsDrawn);
    let mut first = First::of(nodes(&[2_000, 5_000, 5_000]));
    first.view.failing_since = Some(first.now);
    assert_eq!(first.tick(1).recycling, Recycling::AsDrawn, "it cannot know");
}

#[test]
fn nonsense_in_the_reports_never_moves_anybody_below_the_average_and_never_panics() {
    let dice = Dice::seeded(11);
    let odd = [0, 1, 50, 999, 1_000, 5_000, 40_000, 1_000_000_000_000, usize::MAX];
    let pick = |of: &[usize]| of[(dice.unit() * of.len() as f64) as usize];
    for round in 0..300 {
        let mut first = First::of(Vec::new());
        let width = 1 + (dice.unit() * 6.0) as usize;
        for _ in 0..60 {
            first.view.nodes = nodes(&vec![0; width]);
            for node in &mut first.view.nodes {
                (node.n_sessions, node.capacity) = (pick(&odd), pick(&odd));
                node.accept_rate = [0.0, -1.0, 100.0, f64::NAN, f64::INFINITY, 1e300][(dice.unit() * 6.0) as usize];
                node.age = s(pick(&[0, 14, 15, 16, 1 << 40]) as u64);
                (node.moved.shed, node.n_refused, node.n_opened) =
                    (pick(&[0, 9]), pick(&[0, 0, 0, 1]), pick(&odd[..5]));
            }
            let n_sessions = pick(&odd[..7]);
            first.now += s(1);
            first.view.read_at = Some(first.now);
            let orders = first.balancer.tick(first.now, &first.view, &Own { n_sessions, n_shed: 0 });
            let target = orders.plan.places.iter().find(|place| &*place.node == "n0").map_or(0.0, |p| p.target);
            assert!(orders.n_to_shed == 0 || (n_sessions - orders.n_to_shed) as f64 >= target, "{round}: {orders:?}");
            assert!(orders.plan.cv.is_finite() && orders.plan.budget.per_second.is_finite(), "{orders:?}");
            first.n_shed += orders.n_to_shed as u64;
        }
    }
}

#[test]
fn weights_of_1_to_4_and_equal_or_no_counts_have_a_plan() {
    let mut fleet = nodes(&[1_000, 4_000]);
    (fleet[0].capacity, fleet[1].capacity) = (10_000, 40_000);
    let even = plan(fleet);
    assert!(!even.is_uneven() && even.cv == 0.0 && even.places.iter().all(|p| p.role == Role::Settled));
    let nobody = plan(nodes(&[0, 0]));
    assert_eq!((nobody.total, nobody.cv, nobody.highest, nobody.lowest), (0.0, 0.0, 0.0, 0.0));
    assert_eq!(plan(Vec::new()).n_live(), 0);
}
