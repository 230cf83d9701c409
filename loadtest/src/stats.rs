//! What is said of several rounds: their median, and how far they lie apart.

/// The middle one; of an even number the mean of the two in the middle. `None` without any.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The ratio of two series, round by round: what the machine did meanwhile met both of a round.
pub fn ratios(values: &[f64], bases: &[f64]) -> Vec<f64> {
    values.iter().zip(bases).filter(|(_, base)| **base > 0.0).map(|(value, base)| value / base).collect()
}

/// `12.3 (11.9-13.0)`: the median, the lowest and the highest.
pub fn spread(values: &[f64]) -> String {
    let Some(middle) = median(values) else { return "-".to_owned() };
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let digits = if middle < 1.0 { 3 } else { 2 };
    format!("{middle:.digits$} ({low:.digits$}-{high:.digits$})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wild_round_moves_no_median() {
        assert_eq!((median(&[]), median(&[3.0]), median(&[1.0, 2.0])), (None, Some(3.0), Some(1.5)));
        assert_eq!(median(&[1.0, 900.0, 2.0]), Some(2.0));
        assert_eq!(ratios(&[2.0, 6.0, 1.0], &[1.0, 2.0, 0.0]), [2.0, 3.0]);
        assert_eq!(spread(&[1.0, 3.0, 2.0]), "2.00 (1.00-3.00)");
    }
}
