//! The process as the kernel sees it, under the names that every Prometheus library uses. Where
//! there is no `/proc` (not Linux) the figures are absent, never zero.

use std::fmt::Write as _;
use std::fs;

/// Clock ticks a second in `/proc/*/stat`: the kernel's user-space unit, 100 on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Descriptors the process holds open.
pub fn open_fds() -> Option<u64> {
    // Since Linux 6.2 the directory's size is their number; before it, it is 0 and they are
    // counted, which at 40,000 sessions costs some milliseconds.
    match fs::metadata("/proc/self/fd").ok()?.len() {
        0 => Some(fs::read_dir("/proc/self/fd").ok()?.count() as u64),
        n => Some(n),
    }
}

/// How many it may hold: the soft limit.
pub fn max_fds() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_whitespace().next()? {
        "unlimited" => None,
        n => n.parse().ok(),
    }
}

/// Appends the `process_*` families in Prometheus' text format.
pub(super) fn encode(out: &mut String) {
    let stat = fs::read_to_string("/proc/self/stat").ok();
    // The name in brackets may hold anything; the numbered fields begin behind it, with the third.
    let fields: Vec<&str> = stat
        .as_deref()
        .and_then(|s| s.rsplit_once(')'))
        .map(|(_, rest)| rest.split_whitespace().collect())
        .unwrap_or_default();
    let ticks = |number: usize| fields.get(number - 3)?.parse::<f64>().ok().map(|n| n / TICKS_PER_SECOND);
    let cpu = ticks(14).zip(ticks(15)).map(|(user, system)| user + system);
    let started = boot_time().zip(ticks(22)).map(|(boot, after)| boot + after);
    family(out, "process_cpu_seconds_total", "counter", "User and system CPU time spent", cpu);
    family(out, "process_resident_memory_bytes", "gauge", "Resident memory", resident_bytes());
    family(out, "process_open_fds", "gauge", "Open descriptors", open_fds().map(|n| n as f64));
    family(out, "process_max_fds", "gauge", "Soft limit of open descriptors", max_fds().map(|n| n as f64));
    family(out, "process_start_time_seconds", "gauge", "Start of the process, Unix time", started);
}

fn family(out: &mut String, name: &str, kind: &str, help: &str, value: Option<f64>) {
    if let Some(value) = value {
        let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
    }
}

fn resident_bytes() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024.0)
}

fn boot_time() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_opened_file_is_one_more_descriptor_below_the_limit() {
        // Other tests of the process open files too: many at once stand out.
        let before = open_fds().unwrap();
        let files: Vec<_> = (0..64).map(|_| fs::File::open("/proc/self/stat").unwrap()).collect();
        let with = open_fds().unwrap();
        assert!(with >= before + 32, "{before} then {with}");
        drop(files);
        assert!(max_fds().is_none_or(|max| max >= with));
    }

    #[test]
    fn the_start_lies_before_now_and_memory_is_not_nothing() {
        let mut out = String::new();
        encode(&mut out);
        let value = |name: &str| -> f64 {
            out.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')).unwrap().parse().unwrap()
        };
        let now = crate::clock::Clock::system().unix().as_secs_f64();
        let started = value("process_start_time_seconds");
        // The boot time is whole seconds.
        assert!(started <= now + 1.0 && now - started < 3600.0, "{started} against {now}");
        assert!(value("process_resident_memory_bytes") > 100_000.0);
    }
}
