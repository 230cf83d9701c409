//! May this attempt cost us an authentication now, and is there a place for it? Decides in O(1)
//! and without waiting: a refusal must stay cheap when everybody comes at once. What a refusal
//! looks like is the edge's; next on the path is `auth`.
//!
//! Three things are counted: attempts of all (`AcceptBucket`), attempts of one address
//! (`AddressBuckets`), and places taken (`Capacity`).
//!
//! Whoever is refused is given a place in a *virtual queue*: the bucket promises 95 % of its rate,
//! one slot after the other, so that a refused crowd comes back spread over the time the bucket
//! needs for it, and not in one second. Simulated with 10,000 clients at 4 × 100/s: all back in
//! 24 s with 18,000 attempts, against 65 s and 65,000 attempts with a fixed hint.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use crate::clock::Dice;

/// Nobody is asked to come back sooner.
const SOONEST: Duration = Duration::from_secs(1);
/// No slot is promised further ahead: who knows what the fleet looks like then.
const FURTHEST: Duration = Duration::from_secs(60);
/// The part of the rate that is promised; the rest is for newcomers who were never refused.
const PROMISED: f64 = 0.95;
/// One token, counted in billionths so that a rate is exact over any time.
const TOKEN: i64 = 1_000_000_000;

/// A token bucket with its virtual queue. Knows no lock and no chance.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Billionths of a token; below 0 after a charge that it could not pay.
    level: i64,
    /// What the last refill had left over, in billionths of a billionth.
    remainder: u64,
    refilled_at: Instant,
    /// End of the last slot promised.
    promised: Instant,
}

/// What a bucket may hold and gains.
#[derive(Clone, Copy, Debug)]
struct Rate {
    /// Billionths of a token.
    full: i64,
    /// Billionths of a token a second.
    gain: u64,
    /// The time one slot of the virtual queue takes.
    slot: Duration,
}

/// The slot a refused one was given, to be made a delay with chance.
#[derive(Clone, Copy, Debug)]
enum Slot {
    In(Duration),
    BeyondPromise,
}

impl Rate {
    /// At least one token of burst and one in a year, so that no arithmetic can fail.
    fn new(burst: u32, per_second: f64) -> Self {
        let per_second = per_second.max(3.2e-8);
        Self {
            full: i64::from(burst.max(1)) * TOKEN,
            gain: (per_second * TOKEN as f64).round() as u64,
            slot: Duration::from_secs_f64(1.0 / (PROMISED * per_second)),
        }
    }
}

impl Bucket {
    fn full(rate: &Rate, now: Instant) -> Self {
        Self { level: rate.full, remainder: 0, refilled_at: now, promised: now }
    }

    fn refill(&mut self, rate: &Rate, now: Instant) {
        let elapsed = now.saturating_duration_since(self.refilled_at).as_nanos();
        if elapsed == 0 {
            return;
        }
        let gained = elapsed * u128::from(rate.gain) + u128::from(self.remainder);
        let whole = i64::try_from(gained / TOKEN as u128).unwrap_or(i64::MAX);
        self.level = self.level.saturating_add(whole).min(rate.full);
        self.remainder = if self.level == rate.full { 0 } else { (gained % TOKEN as u128) as u64 };
        self.refilled_at = now;
    }

    fn take(&mut self, rate: &Rate, now: Instant) -> Result<(), Slot> {
        self.refill(rate, now);
        if self.level >= TOKEN {
            self.level -= TOKEN;
            return Ok(());
        }
        Err(self.promise(rate, now))
    }

    fn promise(&mut self, rate: &Rate, now: Instant) -> Slot {
        let start = (now + SOONEST).max(self.promised);
        if start - now > FURTHEST {
            return Slot::BeyondPromise;
        }
        self.promised = start + rate.slot;
        Slot::In(start - now)
    }

    /// May leave a debt, but none above a whole bucket.
    fn charge(&mut self, rate: &Rate, n_tokens: u32, now: Instant) {
        self.refill(rate, now);
        let owed = i64::from(n_tokens) * TOKEN;
        self.level = self.level.saturating_sub(owed).max(-rate.full);
    }

    fn give_back(&mut self, rate: &Rate, now: Instant) {
        self.refill(rate, now);
        self.level = (self.level + TOKEN).min(rate.full);
    }
}

impl Slot {
    /// The jitter is added, never clamped: a clamp would gather again what was spread.
    fn delay(self, dice: &Dice) -> Duration {
        match self {
            Slot::In(slot) => {
                let room = SOONEST.max(slot / 10).min(FURTHEST.saturating_sub(slot));
                slot + dice.between(Duration::ZERO, room)
            }
            Slot::BeyondPromise => dice.between(FURTHEST / 2, FURTHEST),
        }
    }
}

/// How many attempts the node authenticates: a burst, and then a rate that holds over any time.
#[derive(Debug)]
pub struct AcceptBucket {
    rate: Rate,
    bucket: Mutex<Bucket>,
    dice: Dice,
}

impl AcceptBucket {
    /// Full. `burst` is the most tokens it ever holds (at least 1), `per_second` what it gains.
    pub fn new(burst: u32, per_second: f64, dice: Dice) -> Self {
        let rate = Rate::new(burst, per_second);
        Self { rate, bucket: Mutex::new(Bucket::full(&rate, Instant::now())), dice }
    }

    /// Tokens it gains a second.
    pub fn rate(&self) -> f64 {
        self.rate.gain as f64 / TOKEN as f64
    }

    /// Takes one place.
    ///
    /// # Errors
    /// When to come back: 1 to 60 s, drawn from the virtual queue.
    pub fn take(&self, now: Instant) -> Result<(), Duration> {
        let slot = self.lock().take(&self.rate, now);
        slot.map_err(|slot| slot.delay(&self.dice))
    }

    /// When somebody who is refused for another reason that passes (no capacity, say) may come
    /// back: a slot in the same queue, 1 to 60 s.
    pub fn promise(&self, now: Instant) -> Duration {
        let slot = self.lock().promise(&self.rate, now);
        slot.delay(&self.dice)
    }

    /// Gives one place back: the attempt cost less than was thought. Never above the burst.
    pub fn give_back(&self, now: Instant) {
        self.lock().give_back(&self.rate, now);
    }

    /// Places at hand, 0 to `burst`.
    pub fn tokens(&self, now: Instant) -> f64 {
        let mut bucket = self.lock();
        bucket.refill(&self.rate, now);
        bucket.level as f64 / TOKEN as f64
    }

    fn lock(&self) -> MutexGuard<'_, Bucket> {
        self.bucket.lock().expect("no panic while the accept bucket is held")
    }
}

/// Most addresses remembered. About 5 MiB.
pub const MAX_ADDRESSES: usize = 65_536;

/// Whose bucket: an IPv4 address (also when mapped into IPv6), or the /64 of an IPv6 one, which is
/// what one customer is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Whose {
    V4(u32),
    V6(u64),
}

impl From<IpAddr> for Whose {
    fn from(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            IpAddr::V4(v4) => Whose::V4(v4.to_bits()),
            IpAddr::V6(v6) => Whose::V6((v6.to_bits() >> 64) as u64),
        }
    }
}

/// Loopback, private, link-local and unique-local addresses: a proxy of ours, most likely, behind
/// which is everybody. The address limit is not applied to such peers unless proxies are named.
pub fn is_local(ip: IpAddr) -> bool {
    fn is_local_v6(v6: Ipv6Addr) -> bool {
        v6.is_loopback() || v6.is_unique_local() || v6.is_unicast_link_local()
    }
    match ip.to_canonical() {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_private() || v4.is_link_local(),
        IpAddr::V6(v6) => is_local_v6(v6),
    }
}

/// How many attempts one address has. Memory is bounded: buckets live in two generations; when the
/// young one has half the places, or after the time in which every idle bucket has filled up, the
/// old one is forgotten. So idle addresses go first, and one that keeps trying is never forgotten.
#[derive(Debug)]
pub struct AddressBuckets {
    /// `None`: no limit.
    rate: Option<Rate>,
    half: usize,
    /// From the deepest debt to full.
    recovery: Duration,
    table: Mutex<Table>,
    dice: Dice,
}

#[derive(Debug)]
struct Table {
    young: HashMap<Whose, Bucket>,
    old: HashMap<Whose, Bucket>,
    turned_at: Instant,
}

impl AddressBuckets {
    /// Each address starts with `burst` attempts and gains `per_second`. Either of them 0: off.
    pub fn new(burst: u32, per_second: f64, dice: Dice) -> Self {
        Self::bounded(burst, per_second, dice, MAX_ADDRESSES)
    }

    fn bounded(burst: u32, per_second: f64, dice: Dice, max: usize) -> Self {
        let rate = (burst > 0 && per_second > 0.0).then(|| Rate::new(burst, per_second));
        let recovery =
            rate.map_or(Duration::MAX, |rate| Duration::from_secs_f64(2.0 * rate.full as f64 / rate.gain as f64));
        let table = Table { young: HashMap::new(), old: HashMap::new(), turned_at: Instant::now() };
        Self { rate, half: (max / 2).max(1), recovery, table: Mutex::new(table), dice }
    }

    /// One attempt of this address.
    ///
    /// # Errors
    /// When to come back: 1 to 60 s, drawn from the address's own virtual queue.
    pub fn take(&self, ip: IpAddr, now: Instant) -> Result<(), Duration> {
        let Some(rate) = &self.rate else { return Ok(()) };
        let slot = self.with(ip, rate, now, |bucket| bucket.take(rate, now));
        slot.map_err(|slot| slot.delay(&self.dice))
    }

    /// Charges an address for what it made us do, beyond the attempt. It may owe at most its burst.
    pub fn charge(&self, ip: IpAddr, n_tokens: u32, now: Instant) {
        if let Some(rate) = &self.rate {
            self.with(ip, rate, now, |bucket| bucket.charge(rate, n_tokens, now));
        }
    }

    /// Addresses remembered now, at most `MAX_ADDRESSES`.
    pub fn n_addresses(&self) -> usize {
        let table = self.lock();
        table.young.len() + table.old.len()
    }

    fn with<T>(&self, ip: IpAddr, rate: &Rate, now: Instant, act: impl FnOnce(&mut Bucket) -> T) -> T {
        let whose = Whose::from(ip);
        let mut table = self.lock();
        table.age(self.half, self.recovery, now);
        let Table { young, old, .. } = &mut *table;
        let bucket =
            young.entry(whose).or_insert_with(|| old.remove(&whose).unwrap_or_else(|| Bucket::full(rate, now)));
        act(bucket)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("no panic while the address table is held")
    }
}

impl Table {
    fn age(&mut self, half: usize, recovery: Duration, now: Instant) {
        if self.young.len() >= half || now.saturating_duration_since(self.turned_at) >= recovery {
            self.old = std::mem::take(&mut self.young);
            self.turned_at = now;
        }
    }
}

/// How many sessions the node may hold. A place is taken before anything is awaited and given back
/// by a guard, so that no way of ending can lose one. Clones count together.
#[derive(Clone, Debug)]
pub struct Capacity(Arc<Places>);

#[derive(Debug)]
struct Places {
    max: usize,
    taken: AtomicUsize,
}

/// A place taken; dropping it gives it back. Lives where the session lives, not where the
/// handshake does.
#[derive(Debug)]
#[must_use = "dropping a seat gives it back"]
pub struct Seat(Arc<Places>);

impl Capacity {
    /// `max` places, all free.
    pub fn new(max: usize) -> Self {
        Self(Arc::new(Places { max, taken: AtomicUsize::new(0) }))
    }

    /// A place, unless all are taken. Two callers never get the same one.
    pub fn try_acquire(&self) -> Option<Seat> {
        let more = |taken| (taken < self.0.max).then_some(taken + 1);
        self.0.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Seat(self.0.clone()))
    }

    /// Places taken now.
    pub fn n_taken(&self) -> usize {
        self.0.taken.load(Ordering::Acquire)
    }

    /// All places.
    pub fn max(&self) -> usize {
        self.0.max
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn dice() -> Dice {
        Dice::seeded(7)
    }

    fn n_accepted(bucket: &AcceptBucket, from: Instant, every: Duration, n: u32) -> u32 {
        (0..n).filter(|&i| bucket.take(from + every * i).is_ok()).count() as u32
    }

    #[test]
    fn a_full_bucket_accepts_its_burst_and_not_one_more() {
        let bucket = AcceptBucket::new(200, 100.0, dice());
        let now = Instant::now();
        assert_eq!(n_accepted(&bucket, now, Duration::ZERO, 1_000), 200);
        assert_eq!(bucket.tokens(now), 0.0);
        assert!(bucket.take(now + 9 * MS).is_err());
        assert!(bucket.take(now + 10 * MS).is_ok());
    }

    #[test]
    fn the_rate_is_exact_over_30_seconds_of_overload() {
        for (burst, rate, expected) in [(200, 100.0, 200 + 3_000), (2, 3.0, 2 + 90), (5, 0.5, 5 + 15)] {
            let bucket = AcceptBucket::new(burst, rate, dice());
            let start = Instant::now();
            // 20,000 attempts a second, and the last one at exactly 30 s.
            let n = n_accepted(&bucket, start, Duration::from_micros(50), 600_001);
            assert_eq!(n, expected, "burst {burst}, {rate}/s");
        }
    }

    #[test]
    fn tokens_never_exceed_the_burst() {
        let bucket = AcceptBucket::new(10, 100.0, dice());
        let now = Instant::now();
        bucket.give_back(now);
        assert_eq!(bucket.tokens(now), 10.0);
        let later = now + Duration::from_secs(86_400 * 365);
        assert_eq!(bucket.tokens(later), 10.0);
        assert!(bucket.take(later).is_ok());
        assert_eq!(bucket.tokens(later), 9.0);
        bucket.give_back(later);
        bucket.give_back(later);
        assert_eq!(bucket.tokens(later), 10.0);
        assert_eq!(n_accepted(&bucket, later, Duration::ZERO, 100), 10);
    }

    #[test]
    fn an_instant_before_the_last_one_changes_nothing() {
        let bucket = AcceptBucket::new(1, 1.0, dice());
        let now = Instant::now() + Duration::from_secs(10);
        assert!(bucket.take(now).is_ok());
        assert!(bucket.take(now - Duration::from_secs(5)).is_err());
        assert!(bucket.take(now + 999 * MS).is_err());
        assert!(bucket.take(now + 1_000 * MS).is_ok());
    }

    #[test]
    fn a_refused_crowd_is_spread_over_the_time_the_bucket_needs() {
        let bucket = AcceptBucket::new(200, 100.0, dice());
        let now = Instant::now();
        assert_eq!(n_accepted(&bucket, now, Duration::ZERO, 200), 200);
        let mut per_second = [0; 61];
        let mut last = Duration::ZERO;
        for i in 0..1_000u32 {
            last = bucket.take(now + MS * i / 100).unwrap_err();
            assert!(last >= SOONEST && last <= FURTHEST, "{last:?}");
            per_second[last.as_secs() as usize] += 1;
        }
        assert!(per_second.iter().all(|&n| n <= 250), "{per_second:?}");
        // 1,000 at 95 a second, after the first second: the last comes back after 11.5 s or so.
        assert!((11..=13).contains(&last.as_secs()), "{last:?}");
        let used = per_second.iter().filter(|&&n| n > 0).count();
        assert!((11..=13).contains(&used), "{per_second:?}");
    }

    #[test]
    fn the_hint_grows_with_the_debt_and_never_promises_more_than_a_minute() {
        let bucket = AcceptBucket::new(1, 10.0, dice());
        let now = Instant::now();
        assert!(bucket.take(now).is_ok());
        let hints: Vec<Duration> = (0..5_000).map(|_| bucket.take(now).unwrap_err()).collect();
        let mean = |some: &[Duration]| some.iter().sum::<Duration>() / some.len() as u32;
        assert!(mean(&hints[..50]) < mean(&hints[200..250]));
        assert!(hints.iter().all(|hint| *hint >= SOONEST && *hint <= FURTHEST));
        // Beyond the promise: U(30, 60), no heap at the cap.
        let beyond = &hints[1_000..];
        assert!(beyond.iter().all(|hint| *hint >= FURTHEST / 2));
        let n_at_cap = beyond.iter().filter(|hint| hint.as_secs() == 59).count();
        assert!(n_at_cap < beyond.len() / 15, "{n_at_cap}");
        // The queue did not grow on while it was full.
        let later = now + Duration::from_secs(61);
        assert!(bucket.promise(later) < 3 * SOONEST);
    }

    #[test]
    fn addresses_do_not_share_and_a_64_is_one_address() {
        let buckets = AddressBuckets::new(2, 1.0, dice());
        let now = Instant::now();
        let try_n = |ip: &str| (0..5).filter(|_| buckets.take(ip.parse().unwrap(), now).is_ok()).count();
        assert_eq!(try_n("192.0.2.1"), 2);
        assert_eq!(try_n("192.0.2.2"), 2);
        assert_eq!(try_n("::ffff:192.0.2.1"), 0, "the same as 192.0.2.1");
        assert_eq!(try_n("2001:db8::1"), 2);
        assert_eq!(try_n("2001:db8::ffff:2"), 0, "the same /64");
        assert_eq!(try_n("2001:db8:0:1::1"), 2);
        assert_eq!(buckets.n_addresses(), 4);
    }

    #[test]
    fn a_charge_may_leave_a_debt_of_one_burst_at_most() {
        let buckets = AddressBuckets::new(10, 1.0, dice());
        let ip = "192.0.2.1".parse().unwrap();
        let now = Instant::now();
        assert!(buckets.take(ip, now).is_ok());
        buckets.charge(ip, 5, now);
        let n = (0..10).filter(|_| buckets.take(ip, now).is_ok()).count();
        assert_eq!(n, 4);
        buckets.charge(ip, u32::MAX, now);
        assert!(buckets.take(ip, now + Duration::from_millis(10_999)).is_err());
        assert!(buckets.take(ip, now + Duration::from_secs(11)).is_ok());
    }

    #[test]
    fn zero_is_no_limit_and_remembers_nobody() {
        let now = Instant::now();
        for (burst, rate) in [(0, 20.0), (60, 0.0)] {
            let buckets = AddressBuckets::new(burst, rate, dice());
            let ip = "192.0.2.1".parse().unwrap();
            buckets.charge(ip, 1_000, now);
            assert!((0..1_000).all(|_| buckets.take(ip, now).is_ok()));
            assert_eq!(buckets.n_addresses(), 0);
        }
    }

    #[test]
    fn the_table_is_bounded_and_one_that_keeps_trying_is_not_forgotten() {
        let buckets = AddressBuckets::bounded(1, 0.000_1, dice(), 100);
        let now = Instant::now();
        let bully = "198.51.100.1".parse().unwrap();
        assert!(buckets.take(bully, now).is_ok());
        for i in 0..10_000u32 {
            assert!(buckets.take(IpAddr::V4((0x0a00_0000 + i).into()), now).is_ok());
            assert!(buckets.take(bully, now).is_err(), "forgotten at {i}");
            assert!(buckets.n_addresses() <= 100);
        }
    }

    #[test]
    fn idle_addresses_leave_the_table() {
        let buckets = AddressBuckets::new(60, 20.0, dice());
        let now = Instant::now();
        for i in 0..1_000u32 {
            buckets.take(IpAddr::V4((0x0a00_0000 + i).into()), now).unwrap();
        }
        let somebody = "198.51.100.1".parse().unwrap();
        buckets.take(somebody, now + Duration::from_secs(7)).unwrap();
        buckets.take(somebody, now + Duration::from_secs(14)).unwrap();
        assert_eq!(buckets.n_addresses(), 1);
    }

    #[test]
    fn peers_of_ones_own_network_are_known() {
        for ip in [
            "127.0.0.1",
            "::1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.1.1",
            "fd00::1",
            "fe80::1",
            "::ffff:10.0.0.1",
        ] {
            assert!(is_local(ip.parse().unwrap()), "{ip}");
        }
        for ip in ["192.0.2.1", "172.32.0.1", "100.64.0.1", "2001:db8::1", "::ffff:192.0.2.1"] {
            assert!(!is_local(ip.parse().unwrap()), "{ip}");
        }
    }

    #[test]
    fn a_seat_counts_until_it_is_dropped() {
        let capacity = Capacity::new(5);
        let mut seats: Vec<Seat> = (0..5).map(|_| capacity.try_acquire().unwrap()).collect();
        assert!(capacity.try_acquire().is_none());
        assert_eq!(capacity.n_taken(), 5);
        seats.pop();
        let sixth = capacity.try_acquire();
        assert!(sixth.is_some() && capacity.try_acquire().is_none());
        drop(seats);
        drop(sixth);
        assert_eq!(capacity.n_taken(), 0);
        assert!(Capacity::new(0).try_acquire().is_none());
    }

    #[tokio::test]
    async fn seats_of_cancelled_and_panicked_holders_come_back() {
        let capacity = Capacity::new(1_000);
        let mut tasks = Vec::new();
        for i in 0..1_000 {
            let seat = capacity.try_acquire().unwrap();
            tasks.push(tokio::spawn(async move {
                let _seat = seat;
                match i % 3 {
                    0 => {}
                    1 => std::panic::resume_unwind(Box::new("a session's panic")),
                    _ => std::future::pending().await,
                }
            }));
        }
        assert!(capacity.try_acquire().is_none());
        tokio::task::yield_now().await;
        for task in tasks {
            task.abort();
            let _ = task.await;
        }
        assert_eq!(capacity.n_taken(), 0);
        let all: Vec<Seat> = std::iter::from_fn(|| capacity.try_acquire()).collect();
        assert_eq!(all.len(), 1_000);
    }

    #[test]
    fn never_more_than_the_capacity_at_any_instant_from_many_threads() {
        let capacity = Capacity::new(50);
        let inside = AtomicUsize::new(0);
        let most = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let seats: Vec<Seat> = (0..10).filter_map(|_| capacity.try_acquire()).collect();
                        let n = inside.fetch_add(seats.len(), Ordering::SeqCst) + seats.len();
                        most.fetch_max(n, Ordering::SeqCst);
                        inside.fetch_sub(seats.len(), Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.into_inner() <= 50);
        assert_eq!(capacity.n_taken(), 0);
    }
}
