use http::Request;

use super::*;

fn head(lines: &[(&str, &str)]) -> Parts {
    let mut request = Request::get("/v1/sse");
    for (name, value) in lines {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap().into_parts().0
}

fn seen(scheme: Option<Scheme>, host: Option<&str>) -> Seen {
    Seen { client: [127, 0, 0, 1].into(), scheme, host: host.map(str::to_owned) }
}

fn listed() -> OriginPolicy {
    OriginPolicy::parse(["https://app.example"]).unwrap()
}

fn passes(policy: &OriginPolicy, wire: Wire, place: Option<Place>, lines: &[(&str, &str)]) -> bool {
    let mut all = vec![("host", "gw.example")];
    all.extend(lines);
    match policy.check(wire, &head(&all), place, &seen(None, None)) {
        Ok(()) => true,
        Err(refusal) => {
            assert_eq!(refusal.code, RefusalCode::OriginForbidden);
            false
        }
    }
}

#[test]
fn only_the_allowed_origin_itself_passes() {
    for wire in [Wire::Ws, Wire::Sse] {
        for place in [Some(Place::Cookie), Some(Place::Header), Some(Place::Query), None] {
            for good in ["https://app.example", "https://app.example:443", "HTTPS://APP.Example"] {
                assert!(passes(&listed(), wire, place, &[("origin", good)]), "{good}");
            }
            for bad in [
                "http://app.example",
                "https://app.example:8443",
                "https://app.example/",
                "https://app.example.evil.test",
                "https://evil.test/app.example",
                "https://evil.test#https://app.example",
                "https://user@app.example",
                "https://app.example.",
                "null",
                "",
                "http://a:b",
                "http://a:",
                "http://a:70000",
                "http://[::1",
                "app.example",
                "://app.example",
                "https://",
                "https://app.example, https://app.example",
            ] {
                assert!(!passes(&listed(), wire, place, &[("origin", bad)]), "{bad}");
            }
            let twice = [("origin", "https://app.example"), ("origin", "https://app.example")];
            assert!(!passes(&listed(), wire, place, &twice));
        }
    }
}

#[test]
fn an_absent_origin_passes_without_a_cookie_and_with_one_only_for_a_same_origin_fetch() {
    for policy in [OriginPolicy::SameOrigin, listed()] {
        for wire in [Wire::Ws, Wire::Sse] {
            assert!(passes(&policy, wire, Some(Place::Header), &[]));
            assert!(passes(&policy, wire, None, &[]));
            assert!(!passes(&policy, wire, Some(Place::Cookie), &[]));
            assert!(!passes(&policy, wire, Some(Place::Cookie), &[("sec-fetch-site", "same-site")]));
        }
        let same = [("sec-fetch-site", "same-origin")];
        assert!(passes(&policy, Wire::Sse, Some(Place::Cookie), &same));
        assert!(!passes(&policy, Wire::Ws, Some(Place::Cookie), &same));
        assert!(!passes(&policy, Wire::Sse, Some(Place::Cookie), &[same[0], same[0]]));
    }
}

#[test]
fn without_a_list_only_cookies_are_checked() {
    let foreign = [("origin", "https://evil.test")];
    assert!(passes(&OriginPolicy::SameOrigin, Wire::Ws, Some(Place::Query), &foreign));
    assert!(passes(&OriginPolicy::SameOrigin, Wire::Ws, None, &[("origin", "null")]));
    assert!(!passes(&OriginPolicy::SameOrigin, Wire::Ws, Some(Place::Cookie), &foreign));
    assert!(!passes(&OriginPolicy::SameOrigin, Wire::Ws, Some(Place::Cookie), &[("origin", "null")]));
}

#[test]
fn any_origin_passes_a_star_but_never_with_a_cookie() {
    let any = OriginPolicy::parse(["*"]).unwrap();
    let foreign = [("origin", "https://evil.test")];
    assert!(passes(&any, Wire::Ws, Some(Place::Header), &foreign));
    assert!(!passes(&any, Wire::Ws, Some(Place::Cookie), &foreign));
}

#[test]
fn a_page_without_a_name_passes_a_star_but_never_with_a_cookie() {
    let any = OriginPolicy::parse(["*"]).unwrap();
    for nameless in [&["null"][..], &["file://"], &[""], &["https://a.example", "https://b.example"]] {
        let lines: Vec<_> = nameless.iter().map(|origin| ("origin", *origin)).collect();
        for wire in [Wire::Ws, Wire::Sse] {
            for place in [Some(Place::Header), Some(Place::Subprotocol), Some(Place::Query), None] {
                assert!(passes(&any, wire, place, &lines), "{nameless:?}");
            }
            assert!(!passes(&any, wire, Some(Place::Cookie), &lines), "{nameless:?}");
        }
    }
}

#[test]
fn same_origin_is_scheme_host_and_port_as_the_client_sees_them() {
    let check = |origin: &str, host: &str, seen: &Seen| {
        let head = head(&[("host", host), ("origin", origin)]);
        OriginPolicy::SameOrigin.check(Wire::Ws, &head, Some(Place::Cookie), seen).is_ok()
    };
    let unknown = seen(None, None);
    assert!(check("https://gw.example", "gw.example", &unknown));
    assert!(check("http://gw.example", "GW.example", &unknown));
    assert!(check("https://gw.example", "gw.example:443", &unknown));
    assert!(check("http://[::1]:8080", "[::1]:8080", &unknown));
    assert!(!check("http://gw.example", "gw.example:443", &unknown));
    assert!(!check("https://gw.example:8443", "gw.example", &unknown));
    assert!(!check("https://gw.example", "gw.example:8443", &unknown));
    assert!(!check("https://gw.example.evil.test", "gw.example", &unknown));
    assert!(!check("https://gw.example", "gw.example/x", &unknown));
    let tls = seen(Some(Scheme::Https), None);
    assert!(check("https://gw.example", "gw.example", &tls));
    assert!(!check("http://gw.example", "gw.example", &tls));
    assert!(!check("http://gw.example:443", "gw.example", &tls));
    let proxied = seen(Some(Scheme::Https), Some("app.example:8443"));
    assert!(check("https://app.example:8443", "10.0.0.1:8080", &proxied));
    assert!(!check("https://10.0.0.1:8080", "10.0.0.1:8080", &proxied));
}

#[test]
fn two_hosts_or_none_are_no_origin_and_the_request_target_wins_over_host() {
    let check =
        |head: &Parts| OriginPolicy::SameOrigin.check(Wire::Ws, head, Some(Place::Cookie), &seen(None, None)).is_ok();
    let origin = ("origin", "https://gw.example");
    assert!(!check(&head(&[origin])));
    assert!(!check(&head(&[origin, ("host", "gw.example"), ("host", "gw.example")])));
    let mut absolute = head(&[origin, ("host", "gw.example")]);
    absolute.uri = "http://other.example/v1/ws".parse().unwrap();
    assert!(!check(&absolute));
}

fn cors(policy: &OriginPolicy, origin: &str) -> Vec<(String, String)> {
    let mut map = HeaderMap::new();
    policy.cors(&head(&[("origin", origin)]).headers).apply(&mut map);
    map.iter().map(|(n, v)| (n.to_string(), v.to_str().unwrap().to_owned())).collect()
}

fn pair(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

#[test]
fn an_allowed_origin_gets_exactly_itself_back_and_a_foreign_one_nothing() {
    assert_eq!(
        cors(&listed(), "https://APP.example"),
        [
            pair("vary", "Origin"),
            pair("access-control-allow-origin", "https://APP.example"),
            pair("access-control-allow-credentials", "true"),
            pair("access-control-expose-headers", "Retry-After"),
        ]
    );
    for foreign in ["https://evil.test", "null", "http://app.example"] {
        assert_eq!(cors(&listed(), foreign), [pair("vary", "Origin")]);
    }
    assert!(cors(&OriginPolicy::SameOrigin, "https://app.example").is_empty());
    let any = cors(&OriginPolicy::Any, "https://evil.test");
    assert!(any.contains(&pair("access-control-allow-origin", "https://evil.test")));
    assert!(!any.iter().any(|(name, _)| name == "access-control-allow-credentials"));
}

#[test]
fn a_page_without_a_name_may_read_the_answers_where_every_page_may_but_never_with_credentials() {
    for nameless in ["null", "file://"] {
        assert_eq!(
            cors(&OriginPolicy::Any, nameless),
            [
                pair("vary", "Origin"),
                pair("access-control-allow-origin", "*"),
                pair("access-control-expose-headers", "Retry-After"),
            ]
        );
        let preflight = OriginPolicy::Any.preflight(&head(&[("origin", nameless)]).headers);
        assert_eq!(preflight.headers()["access-control-allow-origin"], "*");
        assert!(preflight.headers().contains_key("access-control-allow-headers"));
    }
    assert_eq!(cors(&OriginPolicy::Any, "null").len(), 3);
    let mut none = HeaderMap::new();
    OriginPolicy::Any.cors(&head(&[]).headers).apply(&mut none);
    assert_eq!(none.len(), 1, "who is no page is told nothing but Vary");
}

#[test]
fn a_preflight_allows_the_credential_and_the_cursor_to_allowed_origins_only() {
    let answer = |origin: &str| listed().preflight(&head(&[("origin", origin)]).headers);
    let good = answer("https://app.example");
    assert_eq!(good.status(), StatusCode::NO_CONTENT);
    assert_eq!(good.headers()["access-control-allow-methods"], "GET");
    assert_eq!(good.headers()["access-control-allow-headers"], "Authorization, Last-Event-ID, Cache-Control");
    assert_eq!(good.headers()["access-control-allow-origin"], "https://app.example");
    let foreign = answer("https://evil.test");
    assert_eq!(foreign.status(), StatusCode::NO_CONTENT);
    assert!(!foreign.headers().keys().any(|name| name.as_str().starts_with("access-control")));
    assert_eq!(foreign.headers()["allow"], "GET, OPTIONS");
}

#[test]
fn the_list_is_read_strictly() {
    assert_eq!(OriginPolicy::parse([]).unwrap(), OriginPolicy::SameOrigin);
    assert_eq!(OriginPolicy::parse(["*", "https://a.example"]).unwrap(), OriginPolicy::Any);
    for bad in ["app.example", "https://app.example/", "https://*.app.example", "null"] {
        assert_eq!(OriginPolicy::parse(["https://a.example", bad]), Err(BadOrigin(bad.into())));
        assert_eq!(OriginPolicy::parse(["*", bad]), Err(BadOrigin(bad.into())));
    }
    let origin = "HTTPS://App.example:443".parse::<Origin>().unwrap();
    assert_eq!(origin.to_string(), "https://app.example");
    assert_eq!("http://[::1]:3000".parse::<Origin>().unwrap().to_string(), "http://[::1]:3000");
}
