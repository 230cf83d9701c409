use super::*;
use crate::close::CloseReason::{Kicked, Replaced};
use crate::departure::{Departure, Who};
use crate::hub::Open;
use crate::memory::Restart;
use crate::testing::{Node, Testing, endings, identity, settle, until};

const ENDED: Option<CloseReason> = Some(Replaced);

/// Lets sessions that are ending go, as their drivers would.
fn bury(sessions: &mut Vec<Open>) {
    sessions.retain(|open| open.session().ending().is_none());
}

#[tokio::test(start_paused = true)]
async fn the_oldest_of_a_user_ends_wherever_it_is() {
    let testing = Testing::new(4);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    let mut open = Vec::new();
    for i in 0..6 {
        let others = [if i % 2 == 0 { &a } else { &b }].map(|node| node.open("42"));
        open.extend(others);
        settle().await;
    }
    let stranger = a.open("43");
    let nobody = [a.open_as(identity(None), &[]), a.open_as(identity(None), &[])];
    settle().await;
    assert_eq!(endings(&open), [ENDED, ENDED, None, None, None, None]);
    assert_eq!(endings(nobody.iter().chain([&stranger])), [None; 3], "nobody is counted with others");
    let closed = |node: &Node| node.metrics.encode().contains("gateway_sessions_closed_total{reason=\"replaced\"} 1");
    bury(&mut open);
    assert!(closed(&a) && closed(&b));
}

#[tokio::test(start_paused = true)]
async fn many_that_come_at_once_are_one_too_many_in_the_order_they_came() {
    let testing = Testing::new(3);
    let node = testing.node("a").await;
    let open: Vec<_> = (0..1_000).map(|_| node.open("42")).collect();
    until("997 ended", || endings(&open).iter().filter(|e| **e == ENDED).count() == 997).await;
    settle().await;
    assert_eq!(endings(&open[997..]), [None; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_place_is_free_as_soon_as_its_session_begins_to_end() {
    let testing = Testing::new(2);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    let open = [a.open("42"), a.open("42")];
    settle().await;
    // It is told to leave and takes its time: nobody has read its bye yet.
    a.hub.depart(Departure {
        who: Who::Session(open[1].session().info.id.clone().into()),
        reason: Kicked,
        over: Duration::ZERO,
    });
    settle().await;
    let new = b.open("42");
    settle().await;
    assert_eq!(endings(open.iter().chain([&new])), [None, Some(Kicked), None]);
    // The client closes; it is cut.
    open[0].client_closed(Some(1000));
    new.session().cut(CloseReason::Lost);
    settle().await;
    let last = [b.open("42"), b.open("42")];
    settle().await;
    assert_eq!(endings(&last), [None, None]);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_goes_before_its_claim_takes_no_place() {
    let testing = Testing::new(1);
    let node = testing.node("a").await;
    let stays = node.open("42");
    settle().await;
    for _ in 0..3 {
        drop(node.open("42"));
    }
    settle().await;
    assert_eq!(endings([&stays]), [None]);
    assert!(node.hub.may_come(&identity(Some("42"))).is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_cannot_be_kept_now_is_kept_late() {
    let testing = Testing::new(1);
    let node = testing.node("a").await;
    node.memory.set_reachable(false);
    let open = [node.open("42"), node.open("42")];
    let mut gone = Vec::from([node.open("43")]);
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(endings(&open), [None, None], "nobody knows, nobody goes");
    gone.clear();
    node.memory.set_reachable(true);
    until("the older one is replaced", || endings(&open) == [ENDED, None]).await;
    let new = node.open("43");
    settle().await;
    assert_eq!(endings([&new]), [None]);
}

#[tokio::test(start_paused = true)]
async fn a_flushed_list_is_written_again_with_everybody_at_their_place() {
    let testing = Testing::new(2);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    let first = a.open("42");
    settle().await;
    let second = b.open("42");
    settle().await;
    testing.log.flush();
    testing.log.restart(Restart::Clean);
    until("both are back", || [&a, &b].iter().all(|node| node.hub.place.state().is_live)).await;
    settle().await;
    let third = b.open("42");
    settle().await;
    assert_eq!(endings([&first, &second, &third]), [ENDED, None, None]);
}

#[tokio::test(start_paused = true)]
async fn places_outlive_any_time_without_a_change() {
    let testing = Testing::new(300);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    // Two pages of one round.
    let open: Vec<_> = (0..300).map(|_| a.open("42")).collect();
    settle().await;
    tokio::time::sleep(Duration::from_secs(3 * 3600)).await;
    let new = b.open("42");
    settle().await;
    assert_eq!(endings(&open).iter().filter(|e| **e == ENDED).count(), 1);
    assert_eq!((endings([&open[0]]), endings([&new])), (vec![ENDED], vec![None]));
}

#[tokio::test(start_paused = true)]
async fn sessions_of_a_node_that_is_gone_do_not_count_against_who_comes_back() {
    let testing = Testing::new(2);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    // Older than the one on the node that dies.
    let elsewhere = b.open("42");
    settle().await;
    let lost = a.open("42");
    settle().await;
    a.memory.cut_link();
    let back = b.open("42");
    settle().await;
    assert_eq!(endings([&elsewhere, &back]), [None, None]);
    // It was alive after all: now it is one too many, or the oldest is.
    a.memory.restore_link();
    until("one is replaced", || endings([&elsewhere, &lost, &back]).iter().filter(|e| **e == ENDED).count() == 1).await;
    settle().await;
    assert_eq!(endings([&elsewhere, &lost, &back]), [ENDED, None, None]);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_stops_gives_its_places_back() {
    let testing = Testing::new(1);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    let open = a.open("42");
    settle().await;
    a.hub.shut_down().await;
    drop(open);
    let heard = b.open("42");
    settle().await;
    assert_eq!(endings([&heard]), [None]);
    assert!(b.hub.quota.as_ref().unwrap().churn.lock().unwrap().users.is_empty(), "nobody was replaced");
}

#[tokio::test(start_paused = true)]
async fn two_that_always_come_back_do_not_replace_each_other_for_ever() {
    let testing = Testing::new(1);
    let (a, b) = (testing.node("a").await, testing.node("b").await);
    let (user, mut n_replaced, mut n_refused) = (identity(Some("42")), 0, 0);
    let mut tabs = [a.open("42"), b.open("42")];
    let end = Instant::now() + WINDOW - Duration::from_secs(5);
    while Instant::now() < end {
        settle().await;
        for (tab, node) in tabs.iter_mut().zip([&a, &b]) {
            if tab.session().ending() != ENDED {
                continue;
            }
            match node.hub.may_come(&user) {
                Ok(()) => {
                    n_replaced += 1;
                    *tab = node.open("42");
                    break;
                }
                Err(after) => {
                    n_refused += 1;
                    let rest = Duration::from_secs(1)..=Duration::from_secs(60);
                    assert!(rest.contains(&after), "{after:?}");
                }
            }
        }
    }
    assert!(n_refused > 10 && n_replaced <= ALWAYS_ALLOWED + 1, "{n_refused} {n_replaced}");
    assert_eq!(endings(&tabs).iter().filter(|e| e.is_none()).count(), 1, "one stays");
    assert!(a.hub.may_come(&identity(Some("43"))).is_ok(), "others are not touched");
    tokio::time::sleep(WINDOW).await;
    assert!(a.hub.may_come(&user).is_ok(), "only for the rest of the window");
}

#[tokio::test(start_paused = true)]
async fn without_a_limit_nobody_is_replaced_and_nothing_is_kept() {
    let testing = Testing::new(0);
    let node = testing.node("a").await;
    let open: Vec<_> = (0..50).map(|_| node.open("42")).collect();
    settle().await;
    assert_eq!(endings(&open), [None; 50]);
    assert!(node.hub.quota.is_none() && node.hub.may_come(&identity(Some("42"))).is_ok());
}

#[test]
fn a_fight_is_more_than_twice_the_limit_in_a_window() {
    let now = Instant::now();
    for (limit, allowed) in [(1, 4), (2, 4), (3, 6), (4, 8), (u32::MAX, u32::MAX)] {
        assert_eq!(Quota::new(NonZeroU32::new(limit).unwrap()).allowed(), allowed, "{limit}");
    }
    let (mut churn, user) = (Churn::default(), Arc::from("42"));
    let over = |churn: &Churn, at| churn.over("42", 4, at);
    for _ in 0..4 {
        churn.note(&user, now);
    }
    assert_eq!(over(&churn, now), None);
    churn.note(&user, now + Duration::from_secs(10));
    assert_eq!(over(&churn, now + Duration::from_secs(10)), Some(Duration::from_secs(20)));
    assert_eq!(over(&churn, now + WINDOW - Duration::from_millis(1)), Some(Duration::from_millis(1)));
    assert_eq!(over(&churn, now + WINDOW), None);
    // The next one begins a window.
    churn.note(&user, now + WINDOW);
    assert_eq!(over(&churn, now + WINDOW), None);
}

#[test]
fn who_fights_is_remembered_in_bounded_memory() {
    let (mut churn, now) = (Churn::default(), Instant::now());
    for i in 0..MAX_USERS + 100 {
        churn.note(&i.to_string().into(), now);
    }
    assert_eq!(churn.users.len(), MAX_USERS);
    churn.note(&"later".into(), now + WINDOW + SWEEP);
    assert_eq!(churn.users.len(), 1);
}
