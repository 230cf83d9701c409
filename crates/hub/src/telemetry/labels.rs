//! The label values that no other part of the hub names already.

/// A closed set of label values. `ALL` holds every variant in the order of declaration, so that a
/// variant's number is its place.
macro_rules! labels {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// Every value.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// The label's value.
            pub fn word(self) -> &'static str {
                match self { $($name::$variant => $word,)+ }
            }
        }
    };
}

labels! {
    /// How a session's first `ready` came out.
    ResumeLabel {
        /// No cursor was given.
        New = "new",
        /// Everything missed was replayed.
        Ok = "ok",
        /// Something may be missing.
        Gap = "gap",
        /// It ended before its `ready`, or is a raw session and never has one.
        None = "none",
    }
}

labels! {
    /// Who said whether a token is revoked.
    RevocationSource {
        /// The shared list.
        Redis = "redis",
        /// This node had seen the revocation itself.
        Local = "local",
        /// Nobody could say in time.
        Unavailable = "unavailable",
        /// The token has nothing that could be revoked, or it is an anonymous session.
        Unneeded = "unneeded",
    }
}

labels! {
    /// The separate connections to Redis.
    RedisLink {
        /// The one that hears.
        Pubsub = "pubsub",
        /// Publishing.
        Publish = "publish",
        /// Replays and repairs.
        Read = "read",
        /// The revocation list.
        Revocation = "revocation",
        /// Fleet reports.
        Fleet = "fleet",
    }
}

labels! {
    /// Why a node did not deliver what somebody else wrote into Redis.
    SkipReason {
        /// `data` is no JSON text.
        NotJson = "not_json",
        /// Over `GATEWAY_MAX_MESSAGE`.
        TooLarge = "too_large",
        /// The event's name is outside its alphabet.
        BadName = "bad_name",
        /// Not a form that this version reads.
        Malformed = "malformed",
    }
}

labels! {
    /// Why no session is moved to an emptier node at the moment.
    ShedSuspension {
        /// An operator said so.
        Hold = "hold",
        /// A node of the fleet is draining.
        Draining = "draining",
        /// Several versions are running, or were a minute ago.
        Deploy = "deploy",
        /// The fleet's total or membership moved too lately to be judged.
        Unsettled = "unsettled",
        /// The fleet refuses newcomers: moved clients would not come in.
        Refusing = "refusing",
        /// Too many reports are missing or old.
        Stale = "stale",
        /// Redis does not answer.
        Backplane = "backplane",
        /// Moved clients do not come back, or come back here.
        Ineffective = "ineffective",
    }
}

labels! {
    /// Where the balancer in front puts clients, as far as it shows.
    LbPolicy {
        /// Too little was seen: the fleet is even, or hardly anybody came.
        Unknown = "unknown",
        /// To the emptiest node: least connections.
        Emptiest = "emptiest",
        /// Rather to emptier ones: the better of two, or several balancers that do not know of each other.
        Emptier = "emptier",
        /// To all alike, however full: in turn, at random, or hashed newcomers.
        Spread = "spread",
        /// Back to where they were: by address, cookie or hash.
        Sticky = "sticky",
    }
}
