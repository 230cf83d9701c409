//! What the hub wants from the link, and what stands upstream. Decides which channels have to be
//! looked at; the link compares what is wanted with what stands. What is wanted survives every link,
//! what stands is one link's.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

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
    /// All that are wanted, stand, or have to be looked at.
    all: HashMap<Channel, Stand>,
    touched: Vec<Channel>,
}

impl Channels {
    fn forget(&mut self) {
        self.touched = Vec::new();
        self.all.retain(|_, stand| {
            *stand = Stand { is_wanted: stand.is_wanted, ..Stand::default() };
            stand.is_wanted
        });
        if self.all.capacity() > 64 && self.all.len() * 4 < self.all.capacity() {
            self.all.shrink_to_fit();
        }
    }
}

/// How it stands with a channel.
#[derive(Clone, Copy, Default)]
struct Stand {
    is_wanted: bool,
    /// Confirmed upstream on the link in use.
    stands: bool,
    is_touched: bool,
}

impl Stand {
    fn is_nothing(self) -> bool {
        !(self.is_wanted || self.stands || self.is_touched)
    }
}

/// A channel that was wanted or unwanted since the last look.
pub(crate) struct Touched {
    pub(crate) channel: Channel,
    pub(crate) is_wanted: bool,
    pub(crate) stands: bool,
}

impl Wants {
    pub(crate) fn want(&self, channel: &Channel) {
        self.touch(channel, true);
    }

    pub(crate) fn unwant(&self, channel: &Channel) {
        self.touch(channel, false);
    }

    fn touch(&self, channel: &Channel, is_wanted: bool) {
        {
            let channels = &mut *self.channels();
            let stand = channels.all.entry(channel.clone()).or_default();
            stand.is_wanted = is_wanted;
            if !std::mem::replace(&mut stand.is_touched, true) {
                channels.touched.push(channel.clone());
            }
        }
        self.bell.notify_one();
    }

    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().expect("nothing panics while it is held")
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

    /// For a new link, on which nothing stands: everything that is wanted, and nothing else to look at.
    pub(crate) fn begin(&self) -> Vec<Channel> {
        let channels = &mut *self.channels();
        channels.forget();
        channels.all.keys().cloned().collect()
    }

    /// There is no link: nothing stands, and what is not wanted is nothing. Nobody else looks at what was touched
    /// then, which would grow with every name that comes and goes.
    pub(crate) fn forget(&self) {
        self.channels().forget();
    }

    /// What was wanted or unwanted since the last look, as it stands now.
    pub(crate) fn touched(&self) -> Vec<Touched> {
        let channels = &mut *self.channels();
        let touched = std::mem::take(&mut channels.touched);
        let look = |channel: Channel| {
            let stand = channels.all.get_mut(&channel)?;
            stand.is_touched = false;
            let Stand { is_wanted, stands, .. } = *stand;
            if stand.is_nothing() {
                channels.all.remove(&channel);
            }
            Some(Touched { channel, is_wanted, stands })
        };
        let touched = touched.into_iter().filter_map(look).collect();
        if channels.all.capacity() > 64 && channels.all.len() * 4 < channels.all.capacity() {
            // The room of a crowd that went.
            channels.all.shrink_to_fit();
        }
        touched
    }

    /// Must this one be subscribed?
    pub(crate) fn is_missing(&self, channel: &Channel) -> bool {
        self.channels().all.get(channel).is_some_and(|stand| stand.is_wanted && !stand.stands)
    }

    /// Is this one wanted?
    pub(crate) fn is_wanted(&self, channel: &Channel) -> bool {
        self.channels().all.get(channel).is_some_and(|stand| stand.is_wanted)
    }

    /// The server has confirmed this one. `Ok`: it is wanted; this is its name as the hub keeps it, one
    /// text for all. `Err`: it was unwanted meanwhile, and has to be left. `None`: no channel.
    pub(crate) fn joined(&self, name: &str) -> Option<Result<Channel, Channel>> {
        let channels = &mut *self.channels();
        if let Some((channel, _)) = channels.all.get_key_value(name) {
            let channel = channel.clone();
            let stand = channels.all.get_mut(name).expect("it was just there");
            stand.stands = true;
            return Some(if stand.is_wanted { Ok(channel) } else { Err(channel) });
        }
        let channel = Channel::new(name).ok()?;
        channels.all.insert(channel.clone(), Stand { stands: true, ..Stand::default() });
        Some(Err(channel))
    }

    /// It is about to be left, if nobody wants it and it stands: from here on it does not.
    pub(crate) fn leaves(&self, channel: &Channel) -> bool {
        let channels = &mut *self.channels();
        let Some(stand) = channels.all.get_mut(channel).filter(|stand| !stand.is_wanted && stand.stands) else {
            return false;
        };
        stand.stands = false;
        if stand.is_nothing() {
            channels.all.remove(channel);
        }
        true
    }

    /// The channel of this name, if it stands.
    pub(crate) fn standing(&self, name: &str) -> Option<Channel> {
        let channels = self.channels();
        let (channel, stand) = channels.all.get_key_value(name)?;
        stand.stands.then(|| channel.clone())
    }

    /// Something may have changed.
    ///
    /// # Cancel safety
    /// A bell that rang is kept for the next call.
    pub(crate) async fn changed(&self) {
        self.bell.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channel(name: &str) -> Channel {
        Channel::new(name).unwrap()
    }

    fn touched(wants: &Wants) -> Vec<(String, bool, bool)> {
        let all = wants.touched();
        all.into_iter().map(|one| (one.channel.to_string(), one.is_wanted, one.stands)).collect()
    }

    #[test]
    fn what_is_neither_wanted_nor_stands_is_forgotten() {
        let wants = Wants::default();
        let a = channel("a");
        wants.want(&a);
        wants.want(&a);
        assert_eq!(touched(&wants), [("a".to_owned(), true, false)], "once, as it stands now");
        assert!(wants.is_missing(&a) && wants.standing("a").is_none());
        assert_eq!(wants.joined("a"), Some(Ok(a.clone())));
        assert!(!wants.is_missing(&a) && wants.standing("a").is_some());
        wants.unwant(&a);
        assert!(wants.standing("a").is_some(), "until it is left");
        assert_eq!(touched(&wants), [("a".to_owned(), false, true)]);
        assert!(wants.leaves(&a) && !wants.leaves(&a));
        assert!(wants.standing("a").is_none());
        assert_eq!(wants.channels().all.len(), 0);
        wants.unwant(&a);
        assert_eq!(touched(&wants), [("a".to_owned(), false, false)]);
        assert_eq!(wants.channels().all.len(), 0);
    }

    #[test]
    fn one_that_is_wanted_again_is_not_left_and_one_that_is_confirmed_too_late_is() {
        let wants = Wants::default();
        let a = channel("a");
        wants.want(&a);
        assert_eq!(wants.joined("a"), Some(Ok(a.clone())));
        wants.unwant(&a);
        wants.want(&a);
        assert!(!wants.leaves(&a));
        assert_eq!(touched(&wants), [("a".to_owned(), true, true)]);
        assert_eq!(wants.joined("gone"), Some(Err(channel("gone"))));
        assert!(wants.standing("gone").is_some() && wants.leaves(&channel("gone")));
        assert_eq!(wants.joined(""), None, "no channel at all");
    }

    #[test]
    fn a_new_link_begins_with_what_is_wanted_and_nothing_stands() {
        let wants = Wants::default();
        for name in ["a", "b", "c"] {
            wants.want(&channel(name));
            let _ = wants.joined(name);
        }
        wants.unwant(&channel("b"));
        let mut all: Vec<_> = wants.begin().iter().map(|channel| channel.to_string()).collect();
        all.sort();
        assert_eq!(all, ["a", "c"]);
        assert!(touched(&wants).is_empty());
        assert!(["a", "b", "c"].iter().all(|name| wants.standing(name).is_none()));
        assert!(wants.is_missing(&channel("a")) && !wants.is_missing(&channel("b")));
    }

    #[test]
    fn without_a_link_what_came_and_went_is_forgotten_and_what_is_wanted_is_not() {
        let wants = Wants::default();
        wants.want(&channel("a"));
        for n in 0..10_000 {
            let passing = channel(&format!("c{n}"));
            wants.want(&passing);
            wants.unwant(&passing);
        }
        wants.forget();
        assert!(wants.channels().all.capacity() < 100 && wants.channels().touched.capacity() == 0);
        assert_eq!(wants.begin(), [channel("a")]);
    }

    #[test]
    fn the_room_of_a_crowd_is_given_back() {
        let wants = Wants::default();
        let all: Vec<_> = (0..10_000).map(|n| channel(&format!("c{n}"))).collect();
        all.iter().for_each(|channel| wants.want(channel));
        wants.touched();
        all.iter().for_each(|channel| wants.unwant(channel));
        wants.touched();
        assert!(wants.channels().all.capacity() < 100 && wants.channels().touched.capacity() == 0);
    }
}
