use futures_util::FutureExt;
use futures_util::future::join;

use crate::auth::Identity;
use crate::channel::{Grants, Pattern};
use crate::hub::Open;
use crate::plugin::Inbound;
use crate::testing::{Testing, identity, settle};

use super::*;

fn listener(open: &Open) -> Listener {
    Listener::new(open.session().clone(), 0)
}

/// Looks at the channel's entry.
fn entry<T>(channels: &Channels, channel: &Channel, look: impl FnOnce(&Entry) -> T) -> T {
    let (shard, hash) = channels.shard(channel);
    look(shard.find(hash, |entry| entry.channel == *channel).unwrap())
}

/// Who hears the channel, as the places in their sessions, slot after slot.
fn heard(channels: &Channels, channel: &Channel) -> Vec<usize> {
    let (mut out, mut from) = (Vec::new(), Some(0));
    while let Some(slot) = from {
        from = channels.listeners(channel, slot, 2, &mut out);
    }
    out.iter().map(Listener::sub).collect()
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
    assert_eq!(channels.sweep(Instant::now() + LINGER, Which::All), 0, "one is left");
    channels.unlisten(&channel, slots[1]);
    let idle = Instant::now();
    assert_eq!(channels.sweep(idle + just_before, Which::All), 0);
    // Somebody came back in the last moment, and left again.
    let (slot, _) = channels.listen(&channel, listener(&open));
    assert_eq!(channels.sweep(idle + LINGER, Which::All), 0);
    tokio::time::sleep(Duration::from_secs(5)).await;
    channels.unlisten(&channel, slot);
    assert_eq!(channels.sweep(Instant::now() + just_before, Which::All), 0);
    assert_eq!((channels.sweep(Instant::now() + LINGER, Which::All), n_known(&channels)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_channel_whose_confirmation_is_still_awaited_is_given_up_only_where_none_waits_to_be_heard() {
    let testing = Testing::new(0);
    let open = testing.node("n").await.open("u");
    let channels = Channels::new(testing.log.node("other"));
    let channel = Channel::new("c").unwrap();
    let (slot, _) = channels.listen(&channel, listener(&open));
    channels.unlisten(&channel, slot);
    let over = Instant::now() + LINGER;
    assert_eq!(channels.sweep(over, Which::Confirmed), 0);
    channels.confirm(&channel);
    channels.unconfirm_all();
    assert_eq!(channels.sweep(over, Which::Confirmed), 0, "another link's");
    channels.confirm(&channel);
    assert_eq!((channels.sweep(over, Which::Confirmed), n_known(&channels)), (1, 0));
    let (slot, _) = channels.listen(&channel, listener(&open));
    channels.unlisten(&channel, slot);
    assert_eq!((channels.sweep(over, Which::All), n_known(&channels)), (1, 0));
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
    channels.sweep(Instant::now(), Which::All);
    let room = entry(&channels, &channel, |entry| entry.listeners.n_slots());
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

#[tokio::test(start_paused = true)]
async fn a_listener_keeps_its_slot_when_others_come_and_go() {
    let testing = Testing::new(0);
    let open = testing.node("n").await.open("u");
    let channels = Channels::new(testing.log.node("other"));
    let channel = Channel::new("c").unwrap();
    let listen = |sub| channels.listen(&channel, Listener::new(open.session().clone(), sub)).0;

    assert_eq!(listen(10), 0, "alone");
    assert_eq!(heard(&channels, &channel), [10]);
    assert_eq!((listen(11), listen(12)), (1, 2));
    assert_eq!(heard(&channels, &channel), [10, 11, 12], "the first is where it was");
    channels.unlisten(&channel, 0);
    assert_eq!(heard(&channels, &channel), [11, 12]);
    assert_eq!(listen(13), 0, "the free slot");
    channels.unlisten(&channel, 1);
    channels.unlisten(&channel, 2);
    assert_eq!(heard(&channels, &channel), [13]);
    channels.unlisten(&channel, 0);
    assert_eq!(heard(&channels, &channel), [0; 0]);
    assert_eq!(listen(14), 0, "alone again");
    assert_eq!(heard(&channels, &channel), [14]);
    // A slot that nobody has, and the one of a session that ended before it was told.
    channels.unlisten(&channel, 1);
    channels.unlisten(&channel, usize::MAX);
    assert_eq!(heard(&channels, &channel), [14]);
    channels.unlisten(&channel, 0);
    assert!(channels.listened().is_empty());
}

#[tokio::test(start_paused = true)]
async fn listeners_are_copied_from_any_slot_on_in_steps_of_any_length() {
    let testing = Testing::new(0);
    let open = testing.node("n").await.open("u");
    let channels = Channels::new(testing.log.node("other"));
    let channel = Channel::new("c").unwrap();
    let copy = |from, max| {
        let mut out = Vec::new();
        (channels.listeners(&channel, from, max, &mut out), out.len())
    };
    assert_eq!(copy(0, 256), (None, 0), "unknown");
    for n in 1..20 {
        channels.listen(&channel, listener(&open));
        for max in [1, 2, 3, 256, usize::MAX] {
            let (mut from, mut n_copied) = (Some(0), 0);
            while let Some(slot) = from {
                let (next, copied) = copy(slot, max);
                assert!(copied <= max && next.is_none_or(|next| next == slot + max));
                (from, n_copied) = (next, n_copied + copied);
            }
            assert_eq!(n_copied, n, "in steps of {max}");
        }
        assert_eq!((copy(n - 1, 1).1, copy(1_000, 1)), (1, (None, 0)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_users_own_channel_is_one_allocation_of_five_words() {
    // As the slab keeps them.
    #[allow(dead_code)]
    enum Slot {
        Vacant(usize),
        Occupied(Listener),
    }
    assert_eq!((size_of::<Entry>(), size_of::<Slot>()), (40, 16));

    let testing = Testing::new(0);
    let open = testing.node("n").await.open("u");
    let channels = Channels::new(testing.log.node("other"));
    let channel = Channel::new("user:u").unwrap();
    channels.listen(&channel, listener(&open));
    channels.confirm(&channel);
    let is_bare =
        || entry(&channels, &channel, |e| matches!(e.listeners, Listeners::One { .. }) && e.awaited.is_none());
    assert!(is_bare(), "nothing of it lies elsewhere");
    // Another device, for a while.
    let (slot, _) = channels.listen(&channel, Listener::new(open.session().clone(), 1));
    channels.sweep(Instant::now(), Which::All);
    assert_eq!(heard(&channels, &channel), [0, 1]);
    channels.unlisten(&channel, slot);
    channels.sweep(Instant::now(), Which::All);
    assert!(is_bare());
    assert_eq!(heard(&channels, &channel), [0]);
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_is_told_when_the_subscription_stands_and_not_after_the_link_was_lost() {
    let testing = Testing::new(0);
    let open = testing.node("n").await.open("u");
    let channels = Channels::new(testing.log.node("other"));
    let channel = Channel::new("c").unwrap();
    channels.confirmed(&channel).await;
    channels.listen(&channel, listener(&open));
    {
        let mut two = Box::pin(join(channels.confirmed(&channel), channels.confirmed(&channel)));
        assert!((&mut two).now_or_never().is_none());
        channels.unconfirm_all();
        assert!((&mut two).now_or_never().is_none(), "they wait on");
        channels.confirm(&channel);
        assert!((&mut two).now_or_never().is_some());
    }
    assert!(channels.confirmed(&channel).now_or_never().is_some(), "at once");
    channels.unconfirm_all();
    assert!(channels.confirmed(&channel).now_or_never().is_none());
    channels.confirm(&channel);
    assert!(channels.confirmed(&channel).now_or_never().is_some());
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
