"""Judges an Autobahn report: autobahn-gate.py index.json

The suite itself exits 0 whatever it found. Good is OK or INFORMATIONAL, for the case and for its close; NON-STRICT
only in 6.4.* (where a server may notice bad UTF-8 at the end of a frame or of the message); and 301 cases at least,
so that a suite that was cut short cannot pass.
"""

import json
import sys

CASES_AT_LEAST = 301


def is_good(case: str, verdict: str) -> bool:
    return verdict in ("OK", "INFORMATIONAL") or (verdict == "NON-STRICT" and case.startswith("6.4."))


def main(path: str) -> int:
    with open(path, encoding="utf-8") as report:
        (cases,) = json.load(report).values()
    bad = []
    for name in sorted(cases, key=lambda name: [int(part) for part in name.split(".")]):
        verdicts = cases[name]["behavior"], cases[name]["behaviorClose"]
        if not all(is_good(name, verdict) for verdict in verdicts):
            bad.append(f"case {name}: {verdicts[0]}, its close: {verdicts[1]}")
    print("\n".join(bad))
    print(f"autobahn: {len(cases) - len(bad)} passed, {len(bad)} failed")
    if len(cases) < CASES_AT_LEAST:
        print(f"only {len(cases)} cases ran, {CASES_AT_LEAST} expected")
    return 1 if bad or len(cases) < CASES_AT_LEAST else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
