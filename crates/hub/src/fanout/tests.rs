use crate::auth::Identity;
use crate::channel::{Grants, Pattern};
use crate::hub::Open;
use crate::plugin::Inbound;
use crate::testing::{Testing, identity, settle};

use super::*;

fn listener(open: &Open) -> Listener {
    Listener { session: open.session().clone(), sub: 0 }
}

fn n_known(channels: &Channels) -> usize {
    channels.shards.iter().map(|shard| shard.lock().unwrap().len()).sum()
}

#[tokio::test(start_paused = true)]
async fn a_channel_is_given_up_ten_seconds_after_its_last_listener_and_not_before() {
    let testing = Testing::new(0);
    let open = testing.node("n").await.open("u");
    let channels = Channels::new(testing.log.node("other"));
    let channel = Channel::new("c").unwrap();
    let just_before = LINGER - Duration::from_millis(1);

    let slots = [channels.listen(&channel, listener(&open)).0, channels.listen(&channel, listener(&open)).0];
    channels.unlisten(&channel, slots[0]);
    assert_eq!(channels.sweep(Instant::now() + LINGER), 0, "one is left");
    channels.unlisten(&channel, slots[1]);
    let idle = Instant::now();
    assert_eq!(channels.sweep(idle + just_before), 0);
    // Somebody came back in the last moment, and left again.
    let (slot, _) = channels.listen(&channel, listener(&open));
    assert_eq!(channels.sweep(idle + LINGER), 0);
    tokio::time::sleep(Duration::from_secs(5)).await;
    channels.unlisten(&channel, slot);
    assert_eq!(channels.sweep(Instant::now() + just_before), 0);
    assert_eq!((channels.sweep(Instant::now() + LINGER), n_known(&channels)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn the_room_of_a_crowd_goes_with_it_and_who_stays_keeps_its_place() {
    let testing = Testing::new(0);
    let open = testing.node("n").await.open("u");
    let channels = Channels::new(testing.log.node("other"));
    let channel = Channel::new("c").unwrap();
    let slots: Vec<usize> = (0..10_000).map(|_| channels.listen(&channel, listener(&open)).0).collect();
    let stays = slots[3];
    slots.iter().filter(|slot| **slot != stays).for_each(|slot| channels.unlisten(&channel, *slot));
    channels.sweep(Instant::now());
    let room = channels.shard(&channel).get(&channel).unwrap().listeners.capacity();
    assert!(room < 64, "room for {room}");
    let mut heard = Vec::new();
    assert_eq!(channels.listeners(&channel, 0, 256, &mut heard), None, "in one step");
    assert_eq!(heard.len(), 1);
    let (next, _) = channels.listen(&channel, listener(&open));
    assert_ne!(next, stays);
    channels.unlisten(&channel, stays);
    channels.unlisten(&channel, next);
    assert!(channels.listened().is_empty());
}

/// May ask for anything.
fn curious() -> Identity {
    Identity { grants: Grants { joined: Vec::new(), askable: vec![Pattern::new("*").unwrap()] }, ..identity(Some("u")) }
}

#[tokio::test(start_paused = true)]
async fn whoever_comes_and_goes_leaves_no_task_no_channel_and_no_waiter_behind() {
    let testing = Testing::new(0);
    let node = testing.node("n").await;
    let n_tasks = node.hub.tasks.len();
    for round in 0..20 {
        // In every fourth round the link is away: they wait for what does not come, and leave.
        if round % 4 == 3 {
            node.memory.cut_link();
        }
        let crowd: Vec<Open> =
            (0..100).map(|i| node.open_as(curious(), &[&format!("c{}", (i + round) % 40)])).collect();
        if round % 2 == 0 {
            settle().await;
        }
        for (i, open) in crowd.iter().enumerate() {
            let ask = |kind: &str| format!(r#"{{"type":"{kind}","channel":"d{}","since":"0"}}"#, i % 30);
            open.received(Inbound::Text(ask("subscribe").into()));
            if i % 3 == 0 {
                open.received(Inbound::Text(ask("unsubscribe").into()));
            }
        }
        if round % 3 == 0 {
            settle().await;
        }
        drop(crowd);
        node.memory.restore_link();
    }
    // The channels' patience, and a beacon that moves the position on.
    tokio::time::sleep(LINGER + Duration::from_secs(20)).await;
    assert_eq!(node.hub.tasks.len(), n_tasks, "tasks");
    assert_eq!((node.hub.load().n_sessions, node.metrics.sessions_open()), (0, 0));
    assert_eq!(n_known(&node.hub.channels), 0, "channels");
    assert_eq!(node.hub.place.inner.lock().unwrap().barriers.len(), 0, "waiters for a position");
}
