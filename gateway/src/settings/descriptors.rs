//! How the descriptors that the system allows this process are shared out. Decides how many are kept for what is
//! no client (listeners, Redis, probes, back ends, the runtimes), how many for handshakes, and how many sessions fit
//! into the rest. A client takes one, from its accept on: one that is accepted and says nothing too.
//!
//! Without a share of its own a crowd of silent connections would take the last descriptors, and then nobody
//! could accept: no probe either, and a process that only has a crowd at its door would be ended as dead.

use crate::config::Config;

/// Not clients'. 256: 22 are in use without anybody, 31 with Redis, at most 32 by probes, the rest is for back ends and
/// for connections that are just closing. Of a limit below 512 half: it has to do.
const RESERVED: usize = 256;
/// Where not everything fits, a third of what is left is for handshakes, for who cannot begin one never becomes
/// a session; but no more than this, twice the default, unless the sessions leave it over.
const HANDSHAKES: usize = 2_048;

/// What the configuration asks for or fewer, so that both fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Places {
    sessions: usize,
    handshakes: usize,
}

impl Places {
    fn asked(config: &Config) -> Self {
        let handshakes = usize::try_from(config.admission.handshakes).unwrap_or(usize::MAX);
        Self { sessions: config.session.max_sessions, handshakes }
    }

    /// At least one of each.
    fn within(self, descriptors: usize) -> Self {
        let spare = descriptors - RESERVED.min(descriptors / 2);
        let share = (spare / 3).min(HANDSHAKES).max(spare.saturating_sub(self.sessions));
        let handshakes = self.handshakes.min(share).max(1);
        Self { sessions: self.sessions.min(spare.saturating_sub(handshakes)).max(1), handshakes }
    }
}

/// Raises the limit of descriptors to what the system allows this process to set itself, and lowers
/// `GATEWAY_HANDSHAKES` and `GATEWAY_MAX_SESSIONS` to what fits, with a warning.
pub fn fit(mut config: Config) -> Config {
    raise();
    let Some(descriptors) = limit() else { return config };
    let asked = Places::asked(&config);
    let fitting = asked.within(descriptors);
    if fitting != asked {
        tracing::warn!(
            descriptors,
            sessions = fitting.sessions,
            sessions_asked = asked.sessions,
            handshakes = fitting.handshakes,
            handshakes_asked = asked.handshakes,
            "GATEWAY_MAX_SESSIONS and GATEWAY_HANDSHAKES are lowered to what the descriptor limit allows: all asked \
             for needs {}",
            asked.sessions.saturating_add(asked.handshakes).saturating_add(RESERVED)
        );
        config.session.max_sessions = fitting.sessions;
        config.admission.handshakes = u32::try_from(fitting.handshakes).unwrap_or(u32::MAX);
    }
    config
}

/// `GATEWAY_MAX_SESSIONS`, or what of it the limit allows as it stands.
pub fn capacity(config: &Config) -> usize {
    let asked = Places::asked(config);
    limit().map_or(asked, |descriptors| asked.within(descriptors)).sessions
}

/// `None`: as many as one likes, or nobody knows.
#[cfg(unix)]
fn limit() -> Option<usize> {
    use rustix::process::{Resource, getrlimit};
    getrlimit(Resource::Nofile).current.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

#[cfg(not(unix))]
fn limit() -> Option<usize> {
    None
}

/// Shells and service managers start with a low soft limit for programs that use `select`; there is none here.
#[cfg(unix)]
fn raise() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })
    {
        tracing::warn!(%error, "the descriptor limit stays as it is");
    }
}

#[cfg(not(unix))]
fn raise() {}

#[cfg(test)]
mod tests {
    use super::*;

    fn within(sessions: usize, handshakes: usize, descriptors: usize) -> (usize, usize) {
        let places = Places { sessions, handshakes }.within(descriptors);
        (places.sessions, places.handshakes)
    }

    #[test]
    fn what_fits_is_left_as_it_is_asked_for() {
        assert_eq!(within(40_000, 1_024, 41_280), (40_000, 1_024));
        assert_eq!(within(40_000, 1_024, 41_279), (39_999, 1_024), "the last session does not");
        assert_eq!(within(100, 600, 1_024), (100, 600), "few sessions leave room for handshakes");
    }

    #[test]
    fn a_small_limit_has_room_for_both_and_for_what_is_no_client() {
        assert_eq!(within(40_000, 1_024, 1_024), (512, 256));
        assert_eq!(within(40_000, 1_024, 256), (86, 42));
        assert_eq!(within(40_000, 1_000_000, 20_256), (17_952, 2_048));
        for descriptors in 8..2_000 {
            let (sessions, handshakes) = within(40_000, 100_000, descriptors);
            assert!(sessions >= 1 && handshakes >= 1);
            assert!(sessions + handshakes + 256.min(descriptors / 2) <= descriptors, "{descriptors}");
        }
        assert_eq!(within(40_000, 1_024, 0), (1, 1));
    }
}
