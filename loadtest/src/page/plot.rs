//! Charts as SVG. Colours are the page's classes, so that they follow its light and its dark.

use std::fmt::Write;

use super::escape;
use crate::report::{Bar, Chart, Line, Whose};

const WIDTH: f64 = 760.0;
/// Of bars: what the labels and the values take, and how high a bar is.
const LABELS: f64 = 250.0;
const VALUES: f64 = 64.0;
const ROW: f64 = 26.0;
/// Of lines: the plot's height, and the room for numbers left of it and below.
const HEIGHT: f64 = 280.0;
const LEFT: f64 = 56.0;
const BELOW: f64 = 40.0;
const TOP: f64 = 24.0;
/// Colours of lines; after them they begin again.
const N_COLOURS: usize = 6;

/// Appends the chart, with its title.
pub fn draw(chart: &Chart, out: &mut String) {
    match chart {
        Chart::Bars { bars, .. } if bars.is_empty() => {}
        Chart::Bars { title, unit, bars } => {
            let _ = writeln!(out, "<figure>\n<figcaption>{}, {}</figcaption>", escape(title), escape(unit));
            draw_bars(bars, unit, out);
            out.push_str("</figure>\n");
        }
        Chart::Lines { title, x, y, lines } => {
            let _ = writeln!(out, "<figure>\n<figcaption>{}</figcaption>", escape(title));
            draw_lines(lines, x, y, out);
            out.push_str("</figure>\n");
        }
    }
}

fn draw_bars(bars: &[Bar], unit: &str, out: &mut String) {
    let values = bars.iter().flat_map(|bar| bar.rounds.iter().copied().chain([bar.value]).chain(bar.bound));
    let top = values.fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let width = WIDTH - LABELS - VALUES;
    let x = |value: f64| LABELS + value / top * width;
    let height = ROW * bars.len() as f64 + 8.0;
    let _ = writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">");
    let _ = writeln!(out, "<line class=\"axis\" x1=\"{LABELS}\" x2=\"{LABELS}\" y1=\"0\" y2=\"{height}\"/>");
    for (n, bar) in bars.iter().enumerate() {
        let y = ROW * n as f64 + 4.0;
        let middle = y + ROW / 2.0 - 2.0;
        let (label, text) = (escape(&bar.label), middle + 4.0);
        let shown = number(bar.value);
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{text:.1}\" text-anchor=\"end\">{label}</text>\n\
             <rect class=\"{}\" x=\"{LABELS}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"2\"><title>{label}: {shown} {}</title></rect>",
            LABELS - 8.0,
            class(bar.whose),
            y + 1.0,
            (x(bar.value) - LABELS).max(0.5),
            ROW - 8.0,
            escape(unit)
        );
        for round in &bar.rounds {
            let _ = writeln!(out, "<circle class=\"round\" cx=\"{:.1}\" cy=\"{middle:.1}\" r=\"2\"/>", x(*round));
        }
        let furthest = bar.rounds.iter().copied().chain([bar.value]).chain(bar.bound).fold(0.0, f64::max);
        if let Some(bound) = bar.bound {
            let (at, y2) = (x(bound), y + ROW - 4.0);
            let what = number(bound);
            let _ = writeln!(
                out,
                "<line class=\"bound\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{:.1}\" y2=\"{y2:.1}\"><title>at most {what}</title></line>",
                y - 2.0
            );
        }
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{text:.1}\">{shown}</text>", x(furthest) + 7.0);
    }
    out.push_str("</svg>\n");
}

fn class(whose: Whose) -> &'static str {
    match whose {
        Whose::Floor => "floor",
        Whose::Gateway => "gateway",
        Whose::Peer => "peer",
    }
}

fn draw_lines(lines: &[Line], x_name: &str, y_name: &str, out: &mut String) {
    let points = || lines.iter().flat_map(|line| line.points.iter().copied());
    let most = |of: fn((f64, f64)) -> f64| points().map(of).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
    let (x_most, y_most) = (most(|point| point.0), most(|point| point.1));
    let (width, bottom) = (WIDTH - LEFT - 16.0, TOP + HEIGHT);
    let x = |value: f64| LEFT + value / x_most * width;
    let y = |value: f64| bottom - value / y_most * HEIGHT;
    let legend = bottom + BELOW + 16.0;
    let _ = writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\">", legend + 12.0);
    for tick in ticks(y_most) {
        let at = y(tick);
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\n\
             <text class=\"soft\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT + width,
            LEFT - 6.0,
            at + 4.0,
            number(tick)
        );
    }
    for tick in ticks(x_most) {
        let _ = writeln!(
            out,
            "<text class=\"soft\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            x(tick),
            bottom + 16.0,
            number(tick)
        );
    }
    let _ = writeln!(
        out,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{bottom}\" y2=\"{bottom}\"/>\n\
         <text class=\"soft\" x=\"{LEFT}\" y=\"14\">{}</text>\n\
         <text class=\"soft\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
        LEFT + width,
        escape(y_name),
        LEFT + width,
        bottom + 32.0,
        escape(x_name)
    );
    let mut legend_at = LEFT;
    for (n, line) in lines.iter().enumerate() {
        let colour = format!("var(--l{})", n % N_COLOURS);
        let path: Vec<String> =
            line.points.iter().map(|(at, value)| format!("{:.1},{:.1}", x(*at), y(*value))).collect();
        let _ = writeln!(out, "<polyline class=\"line\" stroke=\"{colour}\" points=\"{}\"/>", path.join(" "));
        let label = escape(&line.label);
        for (at, value) in &line.points {
            let _ = writeln!(
                out,
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"><title>{label}: {} at {}</title></circle>",
                x(*at),
                y(*value),
                number(*value),
                number(*at)
            );
        }
        let _ = writeln!(
            out,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/>\n<text x=\"{:.1}\" y=\"{legend:.1}\">{label}</text>",
            legend_at + 4.0,
            legend - 4.0,
            legend_at + 13.0
        );
        // About as wide as the text; a few pixels do not matter here.
        legend_at += 32.0 + 6.5 * line.label.chars().count() as f64;
    }
    out.push_str("</svg>\n");
}

/// Four to eight round numbers from zero to `most`.
fn ticks(most: f64) -> Vec<f64> {
    let rough = most / 8.0;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough).unwrap_or(most);
    (0..=8).map(|n| f64::from(n) * step).take_while(|tick| *tick <= most * 1.000_1).collect()
}

/// As many digits as a reader can use.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 0.1 => 2,
        _ => 4,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(15_000.0), [0.0, 2_000.0, 4_000.0, 6_000.0, 8_000.0, 10_000.0, 12_000.0, 14_000.0]);
        for most in [0.000_3, 0.7, 1.0, 99.0, 101.0, 1e9] {
            assert!((4..=9).contains(&ticks(most).len()), "{most}: {:?}", ticks(most));
        }
    }

    #[test]
    fn numbers_have_as_many_digits_as_they_need() {
        let shown = [0.0, 0.012_34, 0.5, 1.104, 12.34, 1_234.5].map(number);
        assert_eq!(shown, ["0", "0.0123", "0.5", "1.1", "12.3", "1234"]);
    }
}
