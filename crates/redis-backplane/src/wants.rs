//! What the hub wants from the link, kept outside it: it survives every loss. Decides which
//! channels have to be looked at; the link compares them with what stands upstream.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use hub::channel::Channel;
use tokio::sync::Notify;

/// Shared by the hub's calls and the link's task. Bounded by the number of channels.
#[derive(Default)]
pub(crate) struct Wants {
    channels: Mutex<Channels>,
    beacon: AtomicBool,
    relink: AtomicBool,
    bell: Notify,
}

#[derive(Default)]
struct Channels {
    wanted: HashSet<Channel>,
    touched: HashSet<Channel>,
}

impl Wants {
    pub(crate) fn want(&self, channel: &Channel) {
        self.touch(channel, |wanted| wanted.insert(channel.clone()));
    }

    pub(crate) fn unwant(&self, channel: &Channel) {
        self.touch(channel, |wanted| wanted.remove(channel));
    }

    fn touch(&self, channel: &Channel, edit: impl FnOnce(&mut HashSet<Channel>) -> bool) {
        {
            let mut channels = self.channels.lock().expect("nothing panics while it is held");
            edit(&mut channels.wanted);
            channels.touched.insert(channel.clone());
        }
        self.bell.notify_one();
    }

    pub(crate) fn ask_beacon(&self) {
        self.beacon.store(true, Ordering::Release);
        self.bell.notify_one();
    }

    pub(crate) fn ask_relink(&self) {
        self.relink.store(true, Ordering::Release);
        self.bell.notify_one();
    }

    pub(crate) fn take_beacon(&self) -> bool {
        self.beacon.swap(false, Ordering::Acquire)
    }

    pub(crate) fn take_relink(&self) -> bool {
        self.relink.swap(false, Ordering::Acquire)
    }

    pub(crate) fn is_wanted(&self, channel: &Channel) -> bool {
        self.channels.lock().expect("nothing panics while it is held").wanted.contains(channel)
    }

    /// The channel of this name as the hub keeps it, if it wants it: one text for all.
    pub(crate) fn wanted(&self, name: &str) -> Option<Channel> {
        self.channels.lock().expect("nothing panics while it is held").wanted.get(name).cloned()
    }

    /// For a new link: everything wanted, nothing else to look at.
    pub(crate) fn all(&self) -> Vec<Channel> {
        let mut channels = self.channels.lock().expect("nothing panics while it is held");
        channels.touched.clear();
        channels.wanted.iter().cloned().collect()
    }

    /// What was wanted or unwanted since the last look, with how it stands now.
    pub(crate) fn touched(&self) -> Vec<(Channel, bool)> {
        let mut channels = self.channels.lock().expect("nothing panics while it is held");
        let touched = std::mem::take(&mut channels.touched);
        touched
            .into_iter()
            .map(|c| {
                let is_wanted = channels.wanted.contains(&c);
                (c, is_wanted)
            })
            .collect()
    }

    /// Something may have changed.
    ///
    /// # Cancel safety
    /// A bell that rang is kept for the next call.
    pub(crate) async fn changed(&self) {
        self.bell.notified().await;
    }
}
