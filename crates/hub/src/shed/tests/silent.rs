//! A backplane that answers late or not at all, which is no error to begin with: nobody is moved by
//! what was known before.

use super::*;
use crate::testing::mute::Answers;

fn all_say(world: &World, answers: Answers) {
    world.nodes.iter().for_each(|node| node.mute.set(answers));
}

#[tokio::test(start_paused = true)]
async fn within_two_seconds_of_its_silence_nobody_is_moved_and_it_goes_on_by_itself() {
    let mut world = World::three_and_a_new_one(ShedMode::On).await;
    world.until_shedding().await;
    all_say(&world, Answers::Never);
    let silent = Instant::now();
    world.pass(s(90)).await;
    assert_eq!(world.n_after(silent + s(2)), 0);
    for node in 0..3 {
        let shed = world.shed(node);
        assert_eq!((shed.state, shed.suspended.contains(&"backplane")), ("suspended", true), "{shed:?}");
        assert_eq!(world.nodes[node].hub.fleet().nodes.len(), 1, "the others are not known any more");
    }
    all_say(&world, Answers::AtOnce);
    let back = Instant::now();
    world.pass(s(30)).await;
    assert_eq!(world.n_after(back), 0, "it waits until it is sure");
    assert_eq!(world.nodes[0].hub.fleet().nodes.len(), 4, "reports go on");
    world.until("it goes on", |world| world.n_after(back) > 10).await;
}

#[tokio::test(start_paused = true)]
async fn a_backplane_that_is_slow_stops_it_as_well_and_is_heard_all_the_same() {
    let mut world = World::three_and_a_new_one(ShedMode::On).await;
    world.until_shedding().await;
    all_say(&world, Answers::After(Duration::from_millis(900)));
    let slow = Instant::now();
    world.pass(s(60)).await;
    assert_eq!(world.n_after(slow + s(2)), 0);
    for node in 0..4 {
        let fleet = world.nodes[node].hub.fleet();
        assert!(fleet.nodes.len() == 4 && fleet.nodes.iter().all(|node| node.age < s(10)), "{fleet:?}");
        assert!(fleet.shed.suspended.contains(&"backplane"), "{:?}", fleet.shed);
    }
    // Half as slow is no reason: so much a command may take.
    all_say(&world, Answers::After(Duration::from_millis(450)));
    let less = Instant::now();
    world.until("it goes on", |world| world.n_after(less) > 10).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_ends_in_time_though_nobody_answers() {
    let mut world = World::three_and_a_new_one(ShedMode::On).await;
    all_say(&world, Answers::Never);
    world.pass(s(10)).await;
    world.clients.clear();
    let node = world.nodes.pop().expect("the new one");
    let began = Instant::now();
    node.hub.shut_down().await;
    assert!(began.elapsed() < s(3), "{:?}", began.elapsed());
}
