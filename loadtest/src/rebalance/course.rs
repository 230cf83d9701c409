//! What the fleet looked like second by second, and what follows from it: when every node had its
//! share, how long that may take at the budget that was in force, how evenly clients came back.
//! Arithmetic; who reads the nodes is `watch`, what is good is `outcome`'s.

/// A node is given sessions only once it has been ready for so long (s).
const JOIN_GRACE: f64 = 15.0;
/// Moved clients come back within so many seconds, drawn evenly.
const J: f64 = 5.0;
/// "Has its share": this near to it.
pub const NEAR: f64 = 0.1;

/// One look.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// Seconds since the new nodes were started.
    pub at: f64,
    /// By node; those that do not run yet have none.
    pub sessions: Vec<usize>,
    /// What `/v1/fleet` of an old node says: sessions a second, what bounds them, and how it stands.
    pub budget: f64,
    pub bound: String,
    pub state: String,
    pub suspended: String,
}

impl Row {
    /// The largest distance of a node from its share, as a part of it.
    pub fn farthest(&self, share: f64) -> f64 {
        self.sessions.iter().map(|n| ((*n as f64 - share) / share).abs()).fold(0.0, f64::max)
    }

    /// Coefficient of variation.
    pub fn cv(&self) -> f64 {
        let n = self.sessions.len().max(1) as f64;
        let mean = self.sessions.iter().sum::<usize>() as f64 / n;
        let variance = self.sessions.iter().map(|n| (*n as f64 - mean).powi(2)).sum::<f64>() / n;
        if mean > 0.0 { variance.sqrt() / mean } else { 0.0 }
    }
}

/// When every node first had its share, to 10 %.
pub fn reached(rows: &[Row], share: f64) -> Option<f64> {
    rows.iter().find(|row| row.farthest(share) <= NEAR).map(|row| row.at)
}

/// The budget in force from the first move on, as the mean over the time in which it allows
/// `moves`; `None` where the rows end before that, or nobody moved.
pub fn budget_for(rows: &[Row], moves: f64) -> Option<f64> {
    let moving = rows.iter().position(|row| row.state == "shedding")?;
    let (mut allowed, mut took) = (0.0, 0.0);
    for pair in rows[moving..].windows(2) {
        let dt = pair[1].at - pair[0].at;
        let budget = pair[0].budget;
        if budget > 0.0 && allowed + budget * dt >= moves {
            return Some(moves / (took + (moves - allowed) / budget));
        }
        allowed += budget * dt;
        took += dt;
    }
    None
}

/// How long it takes at a budget of `b`.
pub fn formula(moves: f64, b: f64) -> f64 {
    JOIN_GRACE + moves / b + J / 2.0
}

/// The most reconnects a second over ten seconds, in units of the highest budget that was in force
/// when those clients were moved. `windows`: counts of ten seconds, beginning a tenth of a second apart.
pub fn most_of_budget(windows: &[u32], rows: &[Row]) -> Option<f64> {
    let ratio = |(at, n): (usize, &u32)| {
        let (from, to) = (at as f64 / 10.0 - J - 2.0, at as f64 / 10.0 + 10.0);
        let in_force = rows.iter().filter(|row| row.at >= from && row.at <= to).map(|row| row.budget);
        // Below one a second there is nothing to measure.
        f64::from(*n) / 10.0 / in_force.fold(1.0, f64::max)
    };
    windows.iter().enumerate().map(ratio).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(at: f64, sessions: &[usize], budget: f64) -> Row {
        let state = if budget > 0.0 { "shedding" } else { "idle" };
        Row { at, sessions: sessions.to_vec(), budget, state: state.to_owned(), ..Row::default() }
    }

    #[test]
    fn a_fleet_is_even_when_the_last_node_is_within_a_tenth() {
        let rows = [row(0.0, &[200, 0], 0.0), row(1.0, &[111, 89], 0.0), row(2.0, &[110, 90], 0.0)];
        assert_eq!(reached(&rows, 100.0), Some(2.0));
        assert_eq!(reached(&rows[..2], 100.0), None);
        assert_eq!(rows[2].cv(), 0.1);
        assert_eq!(row(0.0, &[], 0.0).cv(), 0.0);
    }

    #[test]
    fn the_budget_is_the_mean_over_the_time_that_the_moves_need() {
        let budgets = [0.0, 0.0, 30.0, 30.0, 10.0, 10.0, 10.0];
        let rows: Vec<Row> = budgets.iter().enumerate().map(|(at, b)| row(at as f64, &[], *b)).collect();
        assert_eq!(budget_for(&rows, 60.0), Some(30.0));
        assert_eq!(budget_for(&rows, 70.0), Some(70.0 / 3.0));
        assert_eq!(budget_for(&rows, 65.0), Some(65.0 / 2.5));
        assert_eq!(budget_for(&rows, 90.0), None, "the rows end before");
        assert_eq!(budget_for(&rows[..2], 1.0), None, "nobody moved");
        assert_eq!(formula(100.0, 50.0), 19.5);
    }

    #[test]
    fn reconnects_are_held_against_the_budget_of_the_time_in_which_they_were_moved() {
        let rows = [row(0.0, &[], 20.0), row(10.0, &[], 10.0), row(30.0, &[], 0.0)];
        assert_eq!(most_of_budget(&[200], &rows), Some(1.0));
        let mut windows = vec![0; 75];
        windows[74] = 110;
        assert_eq!(most_of_budget(&windows, &rows), Some(1.1), "from 7.4 s on nobody is of the first look");
        assert_eq!(most_of_budget(&[], &rows), None);
    }
}
