//! The seed of tests that draw by chance: printed, so that a failure can be told again.

use std::hash::{BuildHasher, RandomState};

use hub::clock::Dice;

/// `TEST_SEED`, or one of the moment. It fixes what is drawn, not how tasks are scheduled.
pub fn seed() -> u64 {
    #[allow(clippy::disallowed_methods)]
    let given = std::env::var("TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| RandomState::new().hash_one(0));
    println!("TEST_SEED={seed}");
    seed
}

/// Dice of that seed.
pub fn dice() -> Dice {
    Dice::seeded(seed())
}
