//! How far a long measurement is, on the terminal; nothing where there is none, for a bar in a log
//! file is noise.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Often enough to see that it lives.
const TICK: Duration = Duration::from_millis(200);

/// A bar that is gone when this is dropped.
pub struct Progress(ProgressBar);

impl Progress {
    /// For `n` steps of something.
    pub fn of(what: impl Into<String>, n: usize) -> Progress {
        let style = ProgressStyle::with_template("{msg:<44} {bar:32} {pos}/{len} {elapsed}");
        let bar = ProgressBar::new(n as u64).with_style(style.expect("the template is whole"));
        bar.set_message(what.into());
        bar.enable_steady_tick(TICK);
        Progress(bar)
    }

    pub fn step(&self) {
        self.0.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
