//! Takes channels from an open session, because its new token, a plugin or an administrator says so.
//! Decides what its client is told.

use std::sync::Arc;

use super::asks::{ChannelAsk, NOT_GRANTED};
use crate::channel::Channel;
use crate::hub::Hub;
use crate::message::{self, Message, Unsubscribed};
use crate::session::{Session, SubStage};

/// Takes away what the session may no longer hear. `reason` is for what its identity does not
/// grant; where a plugin forbids what the identity grants, the plugin is the reason.
pub(crate) fn withdraw(hub: &Arc<Hub>, session: &Arc<Session>, reason: Unsubscribed) {
    let (identity, channels): (_, Vec<Channel>) = {
        let state = session.lock();
        (state.identity.clone(), state.subs.iter().flatten().map(|sub| sub.channel.clone()).collect())
    };
    for channel in channels {
        if hub.plugins.may_subscribe(&identity, &channel) {
            continue;
        }
        let reason = if identity.grants.allow(&channel) { Unsubscribed::Plugin } else { reason };
        take_off(hub, session, &channel, |off| match off {
            Off::Heard => Some(message::unsubscribed(&channel, reason)),
            Off::Asked(ask) => ask.forbidden(NOT_GRANTED),
        });
    }
}

/// Had the session a channel that it was to lose?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Had {
    It,
    Nothing,
}

/// Takes one channel away because an administrator says so; the client is told.
pub(crate) fn unsubscribe(hub: &Hub, session: &Session, channel: &Channel) -> Had {
    take_off(hub, session, channel, |off| match off {
        Off::Heard => Some(message::unsubscribed(channel, Unsubscribed::Admin)),
        Off::Asked(ask) => ask.forbidden("taken away by an administrator"),
    })
}

/// A channel that is being taken off a session.
pub(super) enum Off {
    /// It was live.
    Heard,
    /// It was being joined: this has no answer yet, and will get none from `attach`.
    Asked(Arc<ChannelAsk>),
}

/// Takes a channel off a session that is not over, and tells its client in the same moment: an event of another
/// channel that came in between would carry its cursor over an event of this one, of whose loss it does not
/// know yet.
pub(super) fn take_off(
    hub: &Hub,
    session: &Session,
    channel: &Channel,
    told: impl FnOnce(Off) -> Option<Message>,
) -> Had {
    let mut slot = None;
    session.tell(hub.place.position(), |state, _| {
        let sub = state.take_sub(channel)?;
        slot = Some(sub.slot());
        // An answer is queued in the moment in which the channel is live.
        let asked = state.asks.as_ref().filter(|_| sub.stage == SubStage::Joining);
        let current = asked.and_then(|asks| asks.current.clone());
        told(current.map_or(Off::Heard, Off::Asked))
    });
    match slot {
        Some(slot) => {
            hub.channels.unlisten(channel, slot);
            Had::It
        }
        None => Had::Nothing,
    }
}
