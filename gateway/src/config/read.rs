//! Reads variables by the table and collects every fault instead of stopping at the first. Decides
//! which names are unknown and which are Kubernetes' own. Values that contradict each other are
//! `check.rs`'s.

use std::fmt;
use std::io::Read as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::check::Relation;
use super::parse;
use super::table::{Kind, Unset, Variable, Zero, row, variables};

/// Largest file that may hold a secret, in bytes: 64 KiB, far above any key.
const MAX_SECRET_FILE_BYTES: u64 = 64 * 1024;

/// One thing wrong with the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No variable of this name.
    Unknown {
        /// The name as it stands in the environment.
        name: String,
        /// The name that was probably meant.
        meant: Option<String>,
    },
    /// The value cannot be read.
    Bad {
        /// The variable, or its `_FILE` twin.
        name: String,
        /// What is wrong with it; shows the value only where it is no secret.
        problem: String,
        /// What a value looks like.
        expected: String,
    },
    /// Two or more values that do not go together.
    Contradiction(Relation),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Unknown { name, meant: None } => write!(f, "{name}: unknown variable"),
            Fault::Unknown { name, meant: Some(meant) } => write!(f, "{name}: unknown variable; did you mean {meant}?"),
            Fault::Bad { name, problem, expected } => write!(f, "{name}: {problem}; expected {expected}"),
            Fault::Contradiction(relation) => relation.fmt(f),
        }
    }
}

/// Everything wrong with the environment, at once. The process answers it with exit code 64.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ConfigErrors(pub Vec<Fault>);

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0.len() == 1 { "" } else { "s" };
        write!(f, "bad configuration, {} fault{plural}:", self.0.len())?;
        self.0.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

/// The value in force of one variable, as `tidegate config` prints it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its row of the table.
    pub name: &'static str,
    /// Was it set, or is this the default?
    pub is_set: bool,
    /// The value; a secret's is hidden.
    pub value: String,
}

/// Reads one environment. Every `read` of a variable gives a usable value, the default's where the
/// set one is bad; the faults say whether the whole may be used.
pub(super) struct Reader<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
    pub(super) faults: Vec<Fault>,
    pub(super) settings: Vec<Setting>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { lookup, faults: Vec::new(), settings: Vec::new() }
    }

    pub(super) fn address(&mut self, name: &'static str) -> SocketAddr {
        self.value(name, |_, text| parse::address(text))
    }

    pub(super) fn duration(&mut self, name: &'static str) -> Duration {
        self.value(name, duration_of)
    }

    pub(super) fn maybe_duration(&mut self, name: &'static str) -> Option<Duration> {
        self.maybe(name, duration_of)
    }

    /// `None` stands for `auto`.
    pub(super) fn window(&mut self, name: &'static str) -> Option<Duration> {
        self.value(name, |_, text| match text {
            "auto" => Some(None),
            _ => parse::duration(text).filter(|d| !d.is_zero()).map(Some),
        })
    }

    pub(super) fn size(&mut self, name: &'static str) -> usize {
        self.value(name, |kind, text| {
            let Kind::Size { least, most } = kind else { return None };
            parse::size(text).filter(|n| (least..=most).contains(n)).and_then(|n| n.try_into().ok())
        })
    }

    pub(super) fn count<N: TryFrom<u64>>(&mut self, name: &'static str) -> N {
        self.value(name, count_of)
    }

    pub(super) fn count_or<N: TryFrom<u64> + fmt::Display>(&mut self, name: &'static str, or: impl FnOnce() -> N) -> N {
        match self.maybe(name, count_of) {
            Some(number) => number,
            None => self.computed(name, or()),
        }
    }

    pub(super) fn ratio(&mut self, name: &'static str) -> f64 {
        self.value(name, |_, text| parse::ratio(text))
    }

    pub(super) fn switch(&mut self, name: &'static str) -> bool {
        self.value(name, |_, text| match text {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        })
    }

    /// A value of any other form that has a default.
    pub(super) fn value<T>(&mut self, name: &'static str, parse: impl Fn(Kind, &str) -> Option<T>) -> T {
        let variable = row(name);
        let Unset::Value(default) = variable.default else { panic!("{name} has no default value in the table") };
        let default = || parse(variable.kind, default).unwrap_or_else(|| panic!("the default of {name} is good"));
        self.maybe(name, &parse).unwrap_or_else(default)
    }

    /// A value that may be unset.
    pub(super) fn maybe<T>(&mut self, name: &'static str, parse: impl Fn(Kind, &str) -> Option<T>) -> Option<T> {
        let variable = row(name);
        let text = self.set_text(variable)?;
        let parsed = parse(variable.kind, text.trim());
        if parsed.is_none() {
            self.bad(name, quoted(&text), variable);
        }
        parsed
    }

    /// A list that may be unset; `whole` makes the value of its entries or names the bad one.
    pub(super) fn list<T, L>(
        &mut self,
        name: &'static str,
        parse: impl Fn(&str) -> Option<T>,
        whole: impl FnOnce(Vec<T>) -> Result<L, Option<String>>,
    ) -> Option<L> {
        let variable = row(name);
        let text = self.set_text(variable)?;
        match parse::list(&text, parse).and_then(whole) {
            Ok(list) => Some(list),
            Err(entry) => {
                let problem = entry.map_or("has no entry".to_owned(), |e| format!("bad entry {}", quoted(&e)));
                self.bad(name, problem, variable);
                None
            }
        }
    }

    /// A file that must be readable now, so that a wrong path is named with all other faults.
    pub(super) fn path(&mut self, name: &'static str) -> Option<PathBuf> {
        let variable = row(name);
        let path = PathBuf::from(self.set_text(variable)?);
        if let Err(error) = std::fs::File::open(&path).and_then(|mut file| file.read(&mut [0])) {
            self.bad(name, format!("{} cannot be read: {error}", path.display()), variable);
            return None;
        }
        Some(path)
    }

    /// A secret, from the variable or from the file that `<name>_FILE` names.
    pub(super) fn secret<T>(&mut self, name: &'static str, parse: impl Fn(Vec<u8>) -> Result<T, String>) -> Option<T> {
        let variable = row(name);
        let (from, bytes) = self.secret_bytes(variable)?;
        match parse(bytes) {
            Ok(secret) => Some(secret),
            Err(problem) => {
                self.bad(&from, problem, variable);
                None
            }
        }
    }

    /// Tells the value in force of a variable whose default was worked out at the start.
    pub(super) fn computed<T: fmt::Display>(&mut self, name: &'static str, value: T) -> T {
        if let Some(setting) = self.settings.iter_mut().find(|s| s.name == name) {
            setting.value = value.to_string();
        }
        value
    }

    pub(super) fn bad(&mut self, name: &str, problem: String, variable: &Variable) {
        self.faults.push(Fault::Bad { name: name.to_owned(), problem, expected: variable.kind.form() });
    }

    /// Is there a fault that makes what is known of `name` worthless?
    pub(super) fn is_bad(&self, name: &str) -> bool {
        self.faults.iter().any(|fault| match fault {
            Fault::Bad { name: bad, .. } => bad == name || bad.strip_suffix("_FILE") == Some(name),
            Fault::Contradiction(relation) => relation.names.iter().any(|n| n == name),
            Fault::Unknown { .. } => false,
        })
    }

    /// Every name with our prefix that is neither ours nor Kubernetes'.
    pub(super) fn refuse_unknown(&mut self, names: impl Iterator<Item = String>) {
        let mut unknown: Vec<String> =
            names.filter(|n| n.starts_with("GATEWAY_") && !is_ours(n) && !is_injected_by_kubernetes(n)).collect();
        unknown.sort();
        unknown.dedup();
        for name in unknown {
            let meant = nearest(&name);
            self.faults.push(Fault::Unknown { name, meant });
        }
    }

    fn set_text(&mut self, variable: &'static Variable) -> Option<String> {
        let text = (self.lookup)(variable.name).filter(|text| !text.is_empty());
        let value = text.as_deref().map(str::trim).unwrap_or(variable.default.shown()).to_owned();
        self.settings.push(Setting { name: variable.name, is_set: text.is_some(), value });
        let text = text?;
        if text.contains('\u{FFFD}') {
            self.bad(variable.name, "is not valid UTF-8".to_owned(), variable);
            return None;
        }
        Some(text)
    }

    fn secret_bytes(&mut self, variable: &'static Variable) -> Option<(String, Vec<u8>)> {
        let set = |name: &str| (self.lookup)(name).filter(|text| !text.is_empty());
        let file_name = format!("{}_FILE", variable.name);
        let (text, file) = (set(variable.name), set(&file_name));
        let is_set = text.is_some() || file.is_some();
        let value = if is_set { "[hidden]" } else { variable.default.shown() }.to_owned();
        self.settings.push(Setting { name: variable.name, is_set, value });
        match (text, file) {
            (None, None) => None,
            (Some(text), None) if text.contains('\u{FFFD}') => {
                self.bad(variable.name, "is not valid UTF-8 (bytes may stand in a file)".to_owned(), variable);
                None
            }
            (Some(text), None) => Some((variable.name.to_owned(), without_line_end(text.into_bytes()))),
            (None, Some(path)) => match read_small(&path) {
                Ok(bytes) => Some((file_name, without_line_end(bytes))),
                Err(error) => {
                    self.bad(&file_name, format!("{path} cannot be read: {error}"), variable);
                    None
                }
            },
            (Some(_), Some(_)) => {
                let names = vec![variable.name.to_owned(), file_name];
                self.faults
                    .push(Fault::Contradiction(Relation { names, why: "only one of them may be set".to_owned() }));
                None
            }
        }
    }
}

fn duration_of(kind: Kind, text: &str) -> Option<Duration> {
    let zero = if let Kind::Duration(zero) = kind { zero } else { Zero::Refused };
    parse::duration(text).filter(|d| zero == Zero::Allowed || !d.is_zero())
}

fn count_of<N: TryFrom<u64>>(kind: Kind, text: &str) -> Option<N> {
    let Kind::Count { least, most } = kind else { return None };
    parse::whole(text).filter(|n| (least..=most).contains(n)).and_then(|n| n.try_into().ok())
}

/// The value as an error shows it: escaped, and cut where it is long.
fn quoted(text: &str) -> String {
    let cut: String = text.chars().take(80).collect();
    let dots = if cut.len() < text.len() { "…" } else { "" };
    format!("{cut:?}{dots}")
}

fn read_small(path: &str) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_SECRET_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_SECRET_FILE_BYTES {
        return Err(std::io::Error::other("larger than 64KiB"));
    }
    Ok(bytes)
}

/// Drops one `\n` or `\r\n` at the end: editors and `echo` add it, no secret means it.
fn without_line_end(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
        if bytes.last() == Some(&b'\r') {
            bytes.pop();
        }
    }
    bytes
}

fn is_ours(name: &str) -> bool {
    variables().any(|v| name == v.name || (v.kind.is_secret() && name.strip_suffix("_FILE") == Some(v.name)))
}

/// Names that Kubernetes gives every container for a Service called `gateway` or `gateway-…`.
fn is_injected_by_kubernetes(name: &str) -> bool {
    let words: Vec<&str> = name.split('_').skip(1).collect();
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
    let is_protocol = |word: &str| matches!(word, "TCP" | "UDP" | "SCTP");
    match words.as_slice() {
        [.., "SERVICE", "HOST"] | [.., "PORT"] => true,
        [.., "PORT", number, protocol] if is_number(number) && is_protocol(protocol) => true,
        [.., "PORT", number, protocol, "ADDR" | "PROTO"] if is_number(number) && is_protocol(protocol) => true,
        // `…_SERVICE_PORT_<name>`, whose name may have several words.
        words => words.windows(2).position(|pair| pair == ["SERVICE", "PORT"]).is_some_and(|at| {
            let port_name = &words[at + 2..];
            !port_name.is_empty() && port_name.iter().all(|word| !word.is_empty())
        }),
    }
}

/// Our name that differs least from `name`, where the difference is small enough for a typo.
fn nearest(name: &str) -> Option<String> {
    let candidates = variables().flat_map(|v| {
        let file = v.kind.is_secret().then(|| format!("{}_FILE", v.name));
        std::iter::once(v.name.to_owned()).chain(file)
    });
    let upper = name.to_ascii_uppercase();
    candidates
        .map(|candidate| (distance(&upper, &candidate), candidate))
        .filter(|(distance, _)| *distance <= 1 + (name.len() - "GATEWAY_".len()) / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Edits between two names: insert, delete, replace, or swap two neighbours.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            rows[i][j] = match (i, j) {
                (0, n) | (n, 0) => n,
                _ => {
                    let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
                    let least = replaced.min(rows[i - 1][j] + 1).min(rows[i][j - 1] + 1);
                    let is_swap = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
                    if is_swap { least.min(rows[i - 2][j - 2] + 1) } else { least }
                }
            };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kubernetes_injects_is_told_from_a_typo() {
        for injected in [
            "GATEWAY_SERVICE_HOST",
            "GATEWAY_SERVICE_PORT",
            "GATEWAY_SERVICE_PORT_HTTP",
            "GATEWAY_SERVICE_PORT_HTTP_ALT",
            "GATEWAY_PORT",
            "GATEWAY_PORT_8080_TCP",
            "GATEWAY_PORT_8080_TCP_ADDR",
            "GATEWAY_PORT_8080_TCP_PORT",
            "GATEWAY_PORT_8080_TCP_PROTO",
            "GATEWAY_PORT_53_UDP",
            "GATEWAY_ADMIN_SERVICE_HOST",
            "GATEWAY_ADMIN_PORT_8081_TCP_ADDR",
        ] {
            assert!(is_injected_by_kubernetes(injected), "{injected}");
        }
        for ours in [
            "GATEWAY_FLEET_REPROT",
            "GATEWAY_SUPPORT",
            "GATEWAY_PORT_8080",
            "GATEWAY_PORT_X_TCP",
            "GATEWAY_SERVICE_PORT_",
            "GATEWAY_",
        ] {
            assert!(!is_injected_by_kubernetes(ours), "{ours}");
        }
        assert!(variables().all(|v| !is_injected_by_kubernetes(v.name)), "no setting of ours ends so");
    }

    #[test]
    fn a_typo_is_answered_with_the_name_that_was_meant() {
        assert_eq!(nearest("GATEWAY_HEARTBEET").as_deref(), Some("GATEWAY_HEARTBEAT"));
        assert_eq!(nearest("GATEWAY_LITSEN").as_deref(), Some("GATEWAY_LISTEN"));
        assert_eq!(nearest("GATEWAY_JWT_SECRET_FIEL").as_deref(), Some("GATEWAY_JWT_SECRET_FILE"));
        assert_eq!(nearest("GATEWAY_COMPRESSION_LEVEL"), None);
    }

    #[test]
    fn exactly_one_line_end_of_a_secret_is_dropped() {
        for (given, kept) in [("a\n", "a"), ("a\r\n", "a"), ("a", "a"), ("a\n\n", "a\n"), ("a\r", "a\r"), ("\n", "")] {
            assert_eq!(without_line_end(given.into()), kept.as_bytes(), "{given:?}");
        }
    }
}
