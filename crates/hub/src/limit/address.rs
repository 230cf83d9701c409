//! How many attempts one address has. Decides whose bucket an attempt is counted in and which
//! addresses are remembered; how a bucket fills is `bucket`'s.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::time::Instant;

use super::bucket::{Bucket, Rate};
use crate::clock::Dice;

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

#[cfg(test)]
mod tests {
    use super::*;

    fn dice() -> Dice {
        Dice::seeded(7)
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
}
