//! Decides whose address, scheme and host a request has, when proxies may stand in between. Only
//! what a named proxy says is believed; everything else a client can write itself.
//!
//! Grouping (IPv6 by /64) and the exemption of private peers are the limiter's.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use http::HeaderMap;

/// Hops of `X-Forwarded-For` that are looked at, from the right. Real chains have fewer than ten;
/// a longer run of trusted hops counts as garbage.
const MAX_HOPS: usize = 32;

/// Longest `X-Forwarded-Host` that is looked at: a DNS name and a port.
const MAX_HOST_BYTES: usize = 255 + 6;

/// Networks whose word about a client is believed (`GATEWAY_TRUSTED_PROXIES`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<Network>);

/// One network: an address and how many leading bits of it count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    base: IpAddr,
    n_bits: u8,
}

/// The text is no address and no network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no network: expected an address such as 10.1.2.3 or a network such as 10.0.0.0/8 or fd00::/8")]
pub struct BadNetwork(pub String);

/// The scheme in front of the first proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Plain.
    Http,
    /// TLS.
    Https,
}

impl Scheme {
    /// As it stands in an origin.
    pub fn word(self) -> &'static str {
        match self {
            Scheme::Http => "http",
            Scheme::Https => "https",
        }
    }

    /// The port that is not written.
    pub fn default_port(self) -> u16 {
        match self {
            Scheme::Http => 80,
            Scheme::Https => 443,
        }
    }
}

/// What is known of a request's way here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The client: the peer, or the right-most untrusted hop a trusted peer names.
    pub client: IpAddr,
    /// The scheme the client used; `None` where nobody trusted says so.
    pub scheme: Option<Scheme>,
    /// Host and perhaps port the client asked for, where a trusted peer says so.
    pub host: Option<String>,
}

impl FromStr for Network {
    type Err = BadNetwork;

    fn from_str(text: &str) -> Result<Self, BadNetwork> {
        let bad = || BadNetwork(text.to_owned());
        let (base, n_bits) = match text.split_once('/') {
            None => (text, None),
            Some((base, bits)) if !bits.is_empty() && bits.bytes().all(|b| b.is_ascii_digit()) => {
                (base, Some(bits.parse::<u8>().map_err(|_| bad())?))
            }
            Some(_) => return Err(bad()),
        };
        let base: IpAddr = base.parse().map_err(|_| bad())?;
        let most = if base.is_ipv4() { 32 } else { 128 };
        let n_bits = n_bits.unwrap_or(most);
        if n_bits > most {
            return Err(bad());
        }
        // ::ffff:10.0.0.0/104 means 10.0.0.0/8.
        Ok(match base.to_canonical() {
            v4 @ IpAddr::V4(_) if base.is_ipv6() && n_bits >= 96 => Self { base: v4, n_bits: n_bits - 96 },
            _ => Self { base, n_bits },
        })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.n_bits)
    }
}

impl Network {
    /// Does the address lie in it? IPv4 written inside IPv6 counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.base, address.to_canonical()) {
            (IpAddr::V4(base), IpAddr::V4(a)) => {
                (base.to_bits() ^ a.to_bits()).checked_shr(32 - u32::from(self.n_bits)).unwrap_or(0) == 0
            }
            (IpAddr::V6(base), IpAddr::V6(a)) => {
                (base.to_bits() ^ a.to_bits()).checked_shr(128 - u32::from(self.n_bits)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

impl TrustedProxies {
    /// These networks.
    pub fn new(networks: Vec<Network>) -> Self {
        Self(networks)
    }

    /// Is nobody trusted?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Is this address a named proxy?
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(address))
    }

    /// Who asks, and how. `peer` is the socket's other end, `scheme` what the listener itself knows
    /// (`Https` where it ended TLS). The forwarded headers of an untrusted peer are not looked at.
    pub fn seen(&self, peer: IpAddr, scheme: Option<Scheme>, headers: &HeaderMap) -> Seen {
        let peer = peer.to_canonical();
        if !self.contains(peer) {
            return Seen { client: peer, scheme, host: None };
        }
        Seen {
            client: self.right_most_untrusted(headers).unwrap_or(peer),
            scheme: forwarded_scheme(headers).or(scheme),
            host: forwarded_host(headers),
        }
    }

    /// `None`: no hop is named, or what stands there is no list of addresses. A chain of trusted
    /// hops only gives its left end, a client inside.
    fn right_most_untrusted(&self, headers: &HeaderMap) -> Option<IpAddr> {
        let mut inside = None;
        for (i, hop) in from_the_right(headers, "x-forwarded-for").enumerate() {
            if i == MAX_HOPS {
                return None;
            }
            let address = hop_address(hop)?;
            if !self.contains(address) {
                return Some(address);
            }
            inside = Some(address);
        }
        inside
    }
}

/// The members of a comma-separated header over all its lines, last one first. Empty members stand
/// for nothing and are left out; a line that is no visible ASCII is one member that nothing accepts.
fn from_the_right<'a>(headers: &'a HeaderMap, name: &str) -> impl Iterator<Item = &'a str> {
    let lines = headers.get_all(name).into_iter().rev();
    lines.flat_map(|line| line.to_str().unwrap_or("?").rsplit(',')).map(str::trim).filter(|member| !member.is_empty())
}

/// `1.2.3.4`, `1.2.3.4:5`, `::1`, `[::1]`, `[::1]:5`.
fn hop_address(hop: &str) -> Option<IpAddr> {
    if let Ok(address) = hop.parse::<IpAddr>() {
        return Some(address.to_canonical());
    }
    let (address, port) = match hop.strip_prefix('[') {
        Some(rest) => {
            let (v6, port) = rest.split_once(']')?;
            (IpAddr::V6(v6.parse().ok()?), port)
        }
        None => {
            let (v4, port) = hop.split_at(hop.find(':')?);
            (IpAddr::V4(v4.parse().ok()?), port)
        }
    };
    (port.is_empty() || is_port(port.strip_prefix(':')?)).then(|| address.to_canonical())
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit()) && text.parse::<u16>().is_ok()
}

/// Some proxies write the WebSocket's own schemes.
fn forwarded_scheme(headers: &HeaderMap) -> Option<Scheme> {
    let word = from_the_right(headers, "x-forwarded-proto").next()?;
    [("http", Scheme::Http), ("ws", Scheme::Http), ("https", Scheme::Https), ("wss", Scheme::Https)]
        .into_iter()
        .find_map(|(name, scheme)| word.eq_ignore_ascii_case(name).then_some(scheme))
}

fn forwarded_host(headers: &HeaderMap) -> Option<String> {
    let host = from_the_right(headers, "x-forwarded-host").next()?;
    (host.len() <= MAX_HOST_BYTES).then(|| host.to_owned())
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    const PROXY: &str = "10.0.0.7";

    fn trusted() -> TrustedProxies {
        TrustedProxies::new(["10.0.0.0/8", "fd00::/8"].map(|n| n.parse().unwrap()).to_vec())
    }

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(HeaderName::from_static(name), HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        map
    }

    fn client(peer: &str, forwarded: &[&str]) -> String {
        let lines: Vec<_> = forwarded.iter().map(|v| ("x-forwarded-for", *v)).collect();
        trusted().seen(peer.parse().unwrap(), None, &headers(&lines)).client.to_string()
    }

    #[test]
    fn an_untrusted_peer_is_itself_whatever_it_writes() {
        let lines =
            [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-proto", "https"), ("x-forwarded-host", "app.example")];
        let seen = trusted().seen("203.0.113.5".parse().unwrap(), None, &headers(&lines));
        assert_eq!(seen, Seen { client: "203.0.113.5".parse().unwrap(), scheme: None, host: None });
        assert_eq!(client("::ffff:203.0.113.5", &["1.1.1.1"]), "203.0.113.5");
    }

    #[test]
    fn behind_a_trusted_proxy_the_right_most_untrusted_hop_is_the_client() {
        assert_eq!(client(PROXY, &["198.51.100.1"]), "198.51.100.1");
        assert_eq!(client(PROXY, &["6.6.6.6, 198.51.100.1, 10.1.1.1"]), "198.51.100.1");
        assert_eq!(client(PROXY, &["6.6.6.6", "198.51.100.1", "10.1.1.1"]), "198.51.100.1");
        assert_eq!(client("::ffff:10.0.0.7", &["198.51.100.1"]), "198.51.100.1");
        assert_eq!(client(PROXY, &["10.9.9.9, 10.1.1.1"]), "10.9.9.9");
        assert_eq!(client(PROXY, &["garbage, 198.51.100.1"]), "198.51.100.1");
    }

    #[test]
    fn ports_and_brackets_are_understood() {
        for (hop, want) in [
            ("198.51.100.1:4711", "198.51.100.1"),
            ("2001:db8::1", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("[2001:db8::1]:443", "2001:db8::1"),
            ("::ffff:198.51.100.1", "198.51.100.1"),
        ] {
            assert_eq!(client(PROXY, &[hop]), want, "{hop}");
            assert_eq!(client("fd00::7", &[&format!("6.6.6.6, {hop} ,fd01::1")]), want, "{hop}");
        }
    }

    #[test]
    fn garbage_falls_back_to_the_peer() {
        for hop in [
            "unknown",
            "",
            ",",
            "1.2.3",
            "1.2.3.4:",
            "1.2.3.4:99999",
            "1.2.3.4:+1",
            "[::1",
            "[::1]x",
            "[1.2.3.4]",
            "fe80::1%eth0",
            "\u{e4}",
            "1.2.3.4, x",
        ] {
            assert_eq!(client(PROXY, &[hop]), PROXY, "{hop}");
        }
        assert_eq!(client(PROXY, &[]), PROXY);
        assert_eq!(client(PROXY, &[&["1.1.1.1"; 1000].join(",")]), "1.1.1.1");
    }

    #[test]
    fn a_chain_of_trusted_hops_is_followed_to_its_bound_and_no_further() {
        let chain = |n: usize| client(PROXY, &[&format!("198.51.100.1{}", ", 10.0.0.9".repeat(n))]);
        assert_eq!(chain(MAX_HOPS - 1), "198.51.100.1");
        assert_eq!(chain(MAX_HOPS), PROXY);
        assert_eq!(chain(1000), PROXY);
    }

    #[test]
    fn scheme_and_host_come_from_the_nearest_proxy_or_from_the_listener() {
        let seen = |lines: &[_], scheme| trusted().seen(PROXY.parse().unwrap(), scheme, &headers(lines));
        for (word, want) in [
            ("https", Some(Scheme::Https)),
            ("WSS", Some(Scheme::Https)),
            ("http", Some(Scheme::Http)),
            ("ws", Some(Scheme::Http)),
            ("https, http", Some(Scheme::Http)),
            ("gopher", None),
            ("", None),
        ] {
            assert_eq!(seen(&[("x-forwarded-proto", word)], None).scheme, want, "{word}");
        }
        assert_eq!(seen(&[], Some(Scheme::Https)).scheme, Some(Scheme::Https));
        assert_eq!(seen(&[("x-forwarded-host", "evil, app.example:8443")], None).host.unwrap(), "app.example:8443");
        assert_eq!(seen(&[("x-forwarded-host", &"x".repeat(262))], None).host, None);
    }

    #[test]
    fn networks_are_compared_bit_by_bit() {
        let lies_in = |n: &str, a: &str| n.parse::<Network>().unwrap().contains(a.parse().unwrap());
        assert!(lies_in("0.0.0.0/0", "255.1.2.3") && !lies_in("0.0.0.0/0", "::1"));
        assert!(lies_in("::/0", "2001:db8::1"));
        assert!(lies_in("192.168.0.0/23", "192.168.1.255") && !lies_in("192.168.0.0/23", "192.168.2.0"));
        assert!(lies_in("10.1.2.3", "10.1.2.3") && !lies_in("10.1.2.3", "10.1.2.2"));
        assert!(lies_in("fd00::/7", "fc00::1") && !lies_in("fd00::/8", "fc00::1"));
        assert!(lies_in("::ffff:10.0.0.0/104", "10.200.0.1"));
        for bad in [
            "",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "10.0.0/8",
            "host",
            "10.0.0.0/8/8",
            "10.0.0.0/256",
        ] {
            assert_eq!(bad.parse::<Network>(), Err(BadNetwork(bad.into())));
        }
    }
}
