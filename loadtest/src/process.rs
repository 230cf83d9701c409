//! What Linux says about another process: its CPU time and its memory.

use std::time::Duration;

/// Ticks a second in `/proc/PID/stat`: 100 on every Linux that runs programs like these.
const TICKS: u32 = 100;

/// User and system time of `pid` so far.
pub fn cpu_time(pid: u32) -> Result<Duration, String> {
    let path = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let (user, system) = user_and_system(&text).ok_or_else(|| format!("{path}: not understood"))?;
    Ok(Duration::from_secs(user + system) / TICKS)
}

/// CPU time of a process so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// Of all its threads, to the nanosecond where the kernel counts so finely.
    pub total: Duration,
    /// In its own code and in the kernel's, to the hundredth of a second.
    pub user: Duration,
    pub system: Duration,
}

impl Cpu {
    /// Reads it of `pid`. A thread that ended takes its time with it: for servers whose threads stay.
    pub fn of(pid: u32) -> Result<Cpu, String> {
        let path = format!("/proc/{pid}/stat");
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
        let (user, system) = user_and_system(&text).ok_or_else(|| format!("{path}: not understood"))?;
        let (user, system) = (Duration::from_secs(user) / TICKS, Duration::from_secs(system) / TICKS);
        Ok(Cpu { total: run_time(pid).unwrap_or(user + system), user, system })
    }

    pub fn since(&self, earlier: &Cpu) -> Cpu {
        Cpu {
            total: self.total.saturating_sub(earlier.total),
            user: self.user.saturating_sub(earlier.user),
            system: self.system.saturating_sub(earlier.system),
        }
    }
}

/// The scheduler's own count, summed over the threads.
fn run_time(pid: u32) -> Option<Duration> {
    let mut nanos = 0_u64;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let counts = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        nanos += counts.split_ascii_whitespace().next()?.parse::<u64>().ok()?;
    }
    (nanos > 0).then(|| Duration::from_nanos(nanos))
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
fn user_and_system(stat: &str) -> Option<(u64, u64)> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
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
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 9 0 1 2 3";
        assert_eq!(user_and_system(stat), Some((250, 50)));
        assert_eq!(kib("Name:\tx\nVmRSS:\t    1234 kB\n"), Some(1234));
        assert!(resident_bytes(std::process::id()).unwrap() > 0 && cpu_time(std::process::id()).is_ok());
    }
}
