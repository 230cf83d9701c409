//! A report as one HTML file that needs nothing else: tables, plots as inline SVG (`page/plot`), light
//! or dark as the reader's system is. Decides what stands where; figures are the report's.

mod plot;

use std::fmt::Write;

use serde_json::Value;

use crate::report::Report;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5d6775; --paper: #fcfcfd; --rule: #d9dee5; --grid: #e8ecf1;
  --floor: #8b94a1; --gateway: #1f6fb5; --peer: #b8651b; --good: #1c7a44; --bad: #b3261e;
  --l0: #1f6fb5; --l1: #b8651b; --l2: #2a8a5b; --l3: #8452a8; --l4: #a83250; --l5: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa5b4; --paper: #14181e; --rule: #333b47; --grid: #262d37;
  --floor: #8b94a1; --gateway: #5aa7e8; --peer: #e0954d; --good: #5fc98c; --bad: #f07a70;
  --l0: #5aa7e8; --l1: #e0954d; --l2: #63c795; --l3: #b98ad9; --l4: #e27a95; --l5: #9aa5b4; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--rule); }
p.run { color: var(--soft); margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; margin: .75rem 0; } th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.kept { color: var(--good); } .broken { color: var(--bad); font-weight: 600; } .none { color: var(--soft); }
figure { margin: 1.25rem 0; overflow-x: auto; } figcaption { font-weight: 600; margin-bottom: .25rem; }
svg { width: 100%; min-width: 34rem; height: auto; display: block; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--rule); }
svg .floor { fill: var(--floor); } svg .gateway { fill: var(--gateway); } svg .peer { fill: var(--peer); }
svg .round { fill: var(--ink); fill-opacity: .45; } svg .bound { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 4 3; }
svg .line { fill: none; stroke-width: 2; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; color: var(--soft); } summary { cursor: pointer; color: var(--soft); }
";

/// The whole file. `run` says with which command, and where.
pub fn render(report: &Report, run: &str) -> String {
    let mut out = String::new();
    let name = escape(report.name());
    let _ = writeln!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Tidegate loadtest: {name}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>Tidegate loadtest: {name}</h1>\n<p class=\"run\">{}</p>",
        escape(run)
    );
    if report.parts.is_empty() {
        section(report, &mut out);
    } else {
        report.parts.iter().for_each(|part| section(part, &mut out));
    }
    let json = serde_json::to_string_pretty(&report.json).unwrap_or_default();
    let _ = writeln!(out, "<details><summary>All figures as JSON</summary><pre>{}</pre></details>", escape(&json));
    out.push_str("</body>\n</html>\n");
    out
}

fn section(report: &Report, out: &mut String) {
    let _ = writeln!(out, "<section>\n<h2>{}</h2>", escape(report.name()));
    promises(&report.json["promises"], out);
    for chart in &report.charts {
        plot::draw(chart, out);
    }
    out.push_str("<details><summary>As it was printed</summary><pre>");
    for (name, value) in report.rows.iter().filter(|(name, _)| *name != "promise") {
        let _ = writeln!(out, "{}", escape(format!("{name:<36} {value}").trim()));
    }
    out.push_str("</pre></details>\n</section>\n");
}

fn promises(promises: &Value, out: &mut String) {
    let Some(promises) = promises.as_array().filter(|promises| !promises.is_empty()) else { return };
    out.push_str("<table>\n<tr><th></th><th>promise</th><th class=\"n\">found</th><th class=\"n\">bound</th></tr>\n");
    for promise in promises {
        let (class, word) = match promise["kept"].as_bool() {
            Some(true) => ("kept", "kept"),
            Some(false) => ("broken", "broken"),
            None => ("none", "no figure"),
        };
        let text = |key: &str| escape(promise[key].as_str().unwrap_or_default());
        let value = promise["value"].as_f64().map_or("–".to_owned(), plot::number);
        let _ = writeln!(
            out,
            "<tr><td class=\"{class}\">{word}</td><td>{}</td><td class=\"n\">{value}</td><td class=\"n\">{} {}</td></tr>",
            text("what"),
            text("bound"),
            text("unit")
        );
    }
    out.push_str("</table>\n");
}

/// Text as HTML text or as the value of an attribute.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

/// What the figures were measured on, in a line: they mean nothing elsewhere.
pub fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpus = read("/proc/cpuinfo");
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let n_cores = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let kernel = read("/proc/sys/kernel/osrelease");
    format!("{n_cores} cores, {}, Linux {}", model.map_or("?", |(_, model)| model.trim()), kernel.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Bar, Bound, Chart, Line, Sheet, Whose};

    fn report() -> Report {
        let mut sheet = Sheet::new("a <test>");
        sheet.promise("x & y", Some(1.25), Bound::AtMost(1.0), "times");
        sheet.promise("z", None, Bound::AtMost(1.0), "");
        let bar = |label: &str, value| Bar {
            label: label.to_owned(),
            value,
            rounds: vec![value * 0.9, value * 1.1],
            bound: Some(1.1),
            whose: Whose::Gateway,
        };
        let bars = vec![bar("one \"bar\"", 1.0), bar("another", 0.0)];
        sheet.chart(Chart::Bars { title: "bars".to_owned(), unit: "times".to_owned(), bars });
        let lines = vec![
            Line { label: "up".to_owned(), points: vec![(0.0, 1.0), (10.0, 5.0)] },
            Line { label: "nothing".to_owned(), points: Vec::new() },
        ];
        sheet.chart(Chart::Lines { title: "lines".to_owned(), x: "n".to_owned(), y: "ms".to_owned(), lines });
        sheet.finish()
    }

    #[test]
    fn a_page_needs_nothing_from_elsewhere_and_takes_no_text_for_markup() {
        let page = render(&Report::together("all", vec![report()]), "loadtest <all>");
        for foreign in ["http:", "https:", "src=", "href=", "@import", "url(", "<script"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        assert!(page.contains("a &lt;test&gt;") && page.contains("x &amp; y") && page.contains("one &quot;bar&quot;"));
        assert!(page.contains("prefers-color-scheme: dark"));
    }

    #[test]
    fn what_is_opened_is_closed() {
        let page = render(&report(), "");
        for tag in ["section", "table", "tr", "td", "figure", "svg", "text", "title", "details", "pre", "html"] {
            let n_opened = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
            assert_eq!(n_opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }

    #[test]
    fn a_kept_a_broken_and_a_missing_promise_are_told_apart() {
        let page = render(&report(), "");
        assert!(page.contains("class=\"broken\"") && page.contains("class=\"none\""));
    }
}
