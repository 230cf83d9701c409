//! What a measurement found: figures with their units for people, the same for programs, pictures of
//! them for the page, and whether each promise was kept.

use serde_json::{Map, Value, json};

/// What a measurement found.
pub struct Report {
    pub rows: Vec<(&'static str, String)>,
    pub json: Value,
    pub charts: Vec<Chart>,
    /// The reports of several measurements, where this is their sum.
    pub parts: Vec<Report>,
    /// The gateway kept its promises.
    pub is_good: bool,
}

impl Report {
    /// One report of several.
    pub fn together(test: &str, parts: Vec<Report>) -> Report {
        let mut rows = Vec::new();
        for part in &parts {
            rows.push(("", String::new()));
            rows.push(("measurement", part.name().to_owned()));
            rows.extend(part.rows.iter().cloned());
        }
        let json = json!({"test": test, "parts": parts.iter().map(|part| part.json.clone()).collect::<Vec<_>>()});
        let is_good = parts.iter().all(|part| part.is_good);
        Report { rows, json, charts: Vec::new(), parts, is_good }
    }

    /// Which measurement it was.
    pub fn name(&self) -> &str {
        self.json["test"].as_str().unwrap_or_default()
    }
}

/// A picture of figures.
#[derive(Clone, Debug, PartialEq)]
pub enum Chart {
    /// Values of a kind side by side.
    Bars { title: String, unit: String, bars: Vec<Bar> },
    /// Values over something; `x` and `y` name the axes.
    Lines { title: String, x: String, y: String, lines: Vec<Line> },
}

/// A bar of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    pub label: String,
    pub value: f64,
    /// What it is the median of.
    pub rounds: Vec<f64>,
    /// What it may be at most.
    pub bound: Option<f64>,
    pub whose: Whose,
}

/// Whose figure a bar shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// What no server can go below.
    Floor,
    Gateway,
    Peer,
}

/// A line of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub label: String,
    pub points: Vec<(f64, f64)>,
}

/// A report in the making.
pub struct Sheet {
    rows: Vec<(&'static str, String)>,
    json: Map<String, Value>,
    charts: Vec<Chart>,
    promises: Vec<Value>,
    is_good: bool,
}

/// A bound that a figure has to keep.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Sheet {
    pub fn new(test: &str) -> Sheet {
        let json = Map::from_iter([("test".to_owned(), test.into())]);
        Sheet { rows: Vec::new(), json, charts: Vec::new(), promises: Vec::new(), is_good: true }
    }

    /// A figure: `key` names it for programs, `title` for people. `unit` may be empty.
    pub fn figure(&mut self, key: &str, title: &'static str, value: impl Into<Value>, unit: &str) {
        let value = value.into();
        let text = match &value {
            Value::Null => format!("n/a {}", if unit.starts_with('(') { unit } else { "" }),
            Value::String(text) => format!("{text} {unit}"),
            Value::Number(number) if number.is_f64() => {
                format!("{:.3} {unit}", number.as_f64().expect("it was just looked at"))
            }
            other => format!("{other} {unit}"),
        };
        self.rows.push((title, text.trim_end().to_owned()));
        self.json.insert(key.to_owned(), value);
    }

    /// A line for people only.
    pub fn line(&mut self, text: impl Into<String>) {
        self.rows.push(("", text.into()));
    }

    /// Something for programs only.
    pub fn data(&mut self, key: &str, value: impl Into<Value>) {
        self.json.insert(key.to_owned(), value.into());
    }

    pub fn chart(&mut self, chart: Chart) {
        self.charts.push(chart);
    }

    /// Holds a figure against its bound. A figure that is not there is shown as such and breaks
    /// nothing.
    pub fn promise(&mut self, what: &str, value: Option<f64>, bound: Bound, unit: &str) {
        let (sign, limit) = match bound {
            Bound::AtMost(limit) => ("<=", limit),
            Bound::AtLeast(limit) => (">=", limit),
        };
        let is_kept = value.map(|value| match bound {
            Bound::AtMost(limit) => value <= limit,
            Bound::AtLeast(limit) => value >= limit,
        });
        let (word, shown) = match (is_kept, value) {
            (Some(true), Some(value)) => ("kept", format!("{value:.3}")),
            (Some(false), Some(value)) => ("BROKEN", format!("{value:.3}")),
            _ => ("n/a", "-".to_owned()),
        };
        self.rows
            .push(("promise", format!("{word:<7} {what}: {shown} {sign} {limit:.3} {unit}").trim_end().to_owned()));
        let sign_limit = format!("{sign} {limit}");
        self.promises.push(json!({"what": what, "value": value, "bound": sign_limit, "unit": unit, "kept": is_kept}));
        self.is_good &= is_kept != Some(false);
    }

    pub fn finish(mut self) -> Report {
        self.json.insert("promises".to_owned(), self.promises.into());
        Report {
            rows: self.rows,
            json: self.json.into(),
            charts: self.charts,
            parts: Vec::new(),
            is_good: self.is_good,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_kept_at_it_and_broken_beyond_it_and_a_missing_figure_breaks_nothing() {
        for (value, bound, is_good) in [
            (Some(2.0), Bound::AtMost(2.0), true),
            (Some(2.1), Bound::AtMost(2.0), false),
            (Some(0.95), Bound::AtLeast(0.95), true),
            (Some(0.94), Bound::AtLeast(0.95), false),
            (None, Bound::AtMost(1.0), true),
        ] {
            let mut sheet = Sheet::new("t");
            sheet.promise("x", value, bound, "s");
            assert_eq!(sheet.finish().is_good, is_good, "{value:?} {bound:?}");
        }
    }

    #[test]
    fn a_sum_is_good_only_if_every_part_is() {
        let part = |value| {
            let mut sheet = Sheet::new("part");
            sheet.promise("x", Some(value), Bound::AtMost(1.0), "");
            sheet.finish()
        };
        assert!(Report::together("all", vec![part(1.0), part(0.5)]).is_good);
        let broken = Report::together("all", vec![part(1.0), part(1.5)]);
        assert!(!broken.is_good && broken.json["parts"][1]["promises"][0]["kept"] == false);
    }

    #[test]
    fn a_figure_is_shown_with_its_unit_and_kept_as_it_is() {
        let mut sheet = Sheet::new("t");
        sheet.figure("a", "an a", 1.23456, "ms");
        sheet.figure("b", "a b", None::<f64>, "ms");
        let report = sheet.finish();
        assert_eq!(report.rows, [("an a", "1.235 ms".to_owned()), ("a b", "n/a".to_owned())]);
        assert_eq!((&report.json["a"], &report.json["b"]), (&json!(1.23456), &Value::Null));
    }
}
