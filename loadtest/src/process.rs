//! What Linux says about another process: its CPU time and its memory.

use std::time::Duration;

/// Ticks a second in `/proc/PID/stat`: 100 on every Linux that runs programs like these.
const TICKS: u32 = 100;

/// User and system time of `pid` so far.
pub fn cpu_time(pid: u32) -> Result<Duration, String> {
    let path = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    ticks(&text).map(|ticks| Duration::from_secs(ticks) / TICKS).ok_or_else(|| format!("{path}: not understood"))
}

/// Resident memory of `pid`, in bytes.
pub fn resident_bytes(pid: u32) -> Result<u64, String> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    kib(&text).map(|kib| kib * 1024).ok_or_else(|| format!("{path}: not understood"))
}

/// Open descriptors of `pid`.
pub fn n_descriptors(pid: u32) -> Result<usize, String> {
    let path = format!("/proc/{pid}/fd");
    std::fs::read_dir(&path).map(Iterator::count).map_err(|error| format!("{path}: {error}"))
}

/// The second field is the program's name in brackets and may hold anything, brackets too.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

fn kib(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_memory_are_found_in_what_the_kernel_writes() {
        assert_eq!(ticks("7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 9 0 1 2 3"), Some(300));
        assert_eq!(kib("Name:\tx\nVmRSS:\t    1234 kB\n"), Some(1234));
        assert!(resident_bytes(std::process::id()).unwrap() > 0 && cpu_time(std::process::id()).is_ok());
    }
}
