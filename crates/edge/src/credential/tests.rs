use http::{HeaderValue, Request};
use hub::cursor::EventId;
use proptest::prelude::*;

use super::*;

const ON: CredentialConfig = CredentialConfig { cookie: None, query: QueryToken::On };

fn head(uri: &str, lines: &[(&str, &[u8])]) -> Parts {
    let mut request = Request::get(uri);
    for (name, value) in lines {
        request = request.header(*name, HeaderValue::from_bytes(value).unwrap());
    }
    request.body(()).unwrap().into_parts().0
}

fn with_cookie() -> CredentialConfig {
    CredentialConfig { cookie: Some("session".into()), query: QueryToken::On }
}

fn read(uri: &str, lines: &[(&str, &[u8])]) -> StreamRequest {
    StreamRequest::read(&head(uri, lines), &with_cookie()).unwrap()
}

fn found(place: Place, token: &str) -> Credential {
    Credential::Token { place, token: Token(token.into()) }
}

#[test]
fn the_first_place_that_holds_anything_decides() {
    let places: [(&str, &[u8]); 3] = [
        ("authorization", b"Bearer h.h.h"),
        ("sec-websocket-protocol", b"tidegate.v1, bearer.p.p.p"),
        ("cookie", b"a=b; session=c.c.c"),
    ];
    let uri = "/v1/ws?access_token=q.q.q";
    assert_eq!(read(uri, &places).credential, found(Place::Header, "h.h.h"));
    assert_eq!(read(uri, &places[1..]).credential, found(Place::Subprotocol, "p.p.p"));
    assert_eq!(read(uri, &places[2..]).credential, found(Place::Cookie, "c.c.c"));
    assert_eq!(read(uri, &[]).credential, found(Place::Query, "q.q.q"));
    assert_eq!(read("/v1/ws", &[]).credential, Credential::None);
}

#[test]
fn an_unusable_credential_decides_too_and_is_never_anonymous() {
    let query = "/v1/ws?access_token=q.q.q";
    for value in
        [&b""[..], b"Bearer", b"Bearer ", b"Bearer   ", b"Basic dTpw", b"Bearerx", b"x", b"Bearer a b", b"Bearer \xff"]
    {
        let credential = read(query, &[("authorization", value)]).credential;
        assert_eq!(credential, Credential::Unusable { place: Place::Header }, "{value:?}");
        assert_eq!(credential.token().unwrap_err().code, RefusalCode::TokenInvalid);
    }
    let empty = |place, uri, lines: &[_]| assert_eq!(read(uri, lines).credential, Credential::Unusable { place });
    empty(Place::Subprotocol, query, &[("sec-websocket-protocol", b"tidegate.v1, bearer.")]);
    empty(Place::Cookie, query, &[("cookie", b"session=")]);
    empty(Place::Cookie, query, &[("cookie", b"session=\"\"")]);
    empty(Place::Query, "/v1/ws?access_token=", &[]);
    empty(Place::Query, "/v1/ws?access_token", &[]);
    empty(Place::Query, "/v1/ws?access_token=a%20b", &[]);
}

#[test]
fn the_scheme_of_the_header_has_no_letter_case() {
    for value in [&b"bearer t.t.t"[..], b"BEARER t.t.t", b"Bearer   t.t.t"] {
        assert_eq!(read("/", &[("authorization", value)]).credential, found(Place::Header, "t.t.t"));
    }
}

#[test]
fn two_credentials_in_one_place_are_a_bad_request() {
    let refused = |uri: &str, lines: &[_]| StreamRequest::read(&head(uri, lines), &with_cookie()).unwrap_err().code;
    let line: (&str, &[u8]) = ("authorization", b"Bearer t.t.t");
    assert_eq!(refused("/", &[line, line]), RefusalCode::BadRequest);
    let two: (&str, &[u8]) = ("sec-websocket-protocol", b"bearer.a, bearer.b");
    assert_eq!(refused("/", &[two]), RefusalCode::BadRequest);
    assert_eq!(refused("/?access_token=a&access%5Ftoken=b", &[]), RefusalCode::BadRequest);
}

#[test]
fn a_token_may_stand_in_the_second_subprotocol_line() {
    let lines: [(&str, &[u8]); 2] =
        [("sec-websocket-protocol", b"tidegate.v1"), ("sec-websocket-protocol", b"bearer.t.t.t")];
    assert_eq!(read("/", &lines).credential, found(Place::Subprotocol, "t.t.t"));
}

#[test]
fn places_that_are_off_are_not_looked_at() {
    let head = head("/?access_token=q.q.q", &[("cookie", b"session=c.c.c")]);
    let off = CredentialConfig { cookie: None, query: QueryToken::Off };
    assert_eq!(StreamRequest::read(&head, &off).unwrap().credential, Credential::None);
    assert_eq!(StreamRequest::read(&head, &ON).unwrap().credential, found(Place::Query, "q.q.q"));
}

#[test]
fn a_cookie_matches_by_its_whole_name_over_all_lines() {
    let lines: [(&str, &[u8]); 2] =
        [("cookie", b"xsession=1; session2=2; Session=3"), ("cookie", b"session=\"c.c.c\"; session=d")];
    assert_eq!(read("/", &lines).credential, found(Place::Cookie, "c.c.c"));
    assert_eq!(read("/", &lines[..1]).credential, Credential::None);
}

#[test]
fn the_querys_names_and_values_are_percent_decoded() {
    let request = read(
        "/v1/sse?access%5ftoken=a%2Eb%2ec&channel=room%3A1&channel=a+b&channel=%ff&channel=&channel=%zz&channel=%4",
        &[],
    );
    assert_eq!(request.credential, found(Place::Query, "a.b.c"));
    assert_eq!(request.channels, ["room:1", "a+b", "\u{fffd}", "", "%zz", "%4"]);
    assert_eq!(read("/?ACCESS_TOKEN=t", &[]).credential, Credential::None);
}

#[test]
fn the_header_wins_over_the_stale_cursor_in_the_url() {
    let at = |ms| Since::After(EventId { ms, n: 1 });
    let since = |uri, lines: &[_]| read(uri, lines).since;
    assert_eq!(since("/?last_event_id=5-1", &[("last-event-id", b"42-1")]), at(42));
    assert_eq!(since("/?last_event_id=5-1", &[("LAST-EVENT-ID", b"42-1")]), at(42));
    assert_eq!(since("/?last_event_id=5-1", &[("last-event-id", b"odd")]), Since::Unknown);
    assert_eq!(since("/?last_event_id=5%2D1", &[("last-event-id", b"")]), at(5));
    assert_eq!(since("/?last_event_id=5-1", &[]), at(5));
    assert_eq!(since("/?last_event_id=0", &[]), Since::Start);
    assert_eq!(since("/?last_event_id=", &[]), Since::Now);
    assert_eq!(since("/", &[("last-event-id", b"")]), Since::Now);
    assert_eq!(since("/", &[]), Since::Now);
}

#[test]
fn a_hostile_cursor_is_an_unknown_position_and_never_a_refusal() {
    let long = vec![b'1'; 16_384];
    for value in [&b"\x80\xff"[..], b"1-1\t2", b"1-1, 2-1", b"1-1,2-1", &long] {
        assert_eq!(read("/", &[("last-event-id", value)]).since, Since::Unknown);
    }
    let lines: [(&str, &[u8]); 2] = [("last-event-id", b"1-1"), ("last-event-id", b"2-1")];
    assert_eq!(read("/", &lines).since, Since::Unknown);
    assert_eq!(read("/?last_event_id=1-1&last_event_id=2-1", &[]).since, Since::Unknown);
    assert_eq!(read("/?last_event_id=%ff%00", &[]).since, Since::Unknown);
}

#[test]
fn a_token_is_not_in_the_debug_of_anything() {
    let request = read("/", &[("authorization", b"Bearer secret.secret.secret")]);
    assert!(!format!("{request:?}").contains("secret"));
    assert_eq!(request.credential.token().unwrap().unwrap().as_str(), "secret.secret.secret");
}

#[test]
fn a_redacted_path_keeps_everything_but_the_token() {
    let redacted = |uri: &str| redacted_path(&uri.parse().unwrap());
    assert_eq!(redacted("/v1/ws"), "/v1/ws");
    assert_eq!(redacted("/v1/ws?"), "/v1/ws?");
    assert_eq!(redacted("/v1/ws?access_token=s"), "/v1/ws");
    assert_eq!(redacted("/v1/ws?channel=a&access_token=s&last_event_id=1-1"), "/v1/ws?channel=a&last_event_id=1-1");
    assert_eq!(redacted("http://user:s@host/v1/ws?channel=a"), "/v1/ws?channel=a");
    for secret in [
        "ACCESS_TOKEN=s",
        "access%5Ftoken=s",
        "%61ccess_token=s",
        "access%255Ftoken=s",
        "Access%5ftoken=s",
        "x=1;access_token=s",
        "token=eyJhbGciOiJIUzI1NiJ9.e30.s",
        "token=%65yJhbGciOiJIUzI1NiJ9.e30.s",
        "auth=Bearer%20eyJhbGciOiJIUzI1NiJ9.e30.s",
        "access_token",
    ] {
        assert_eq!(redacted(&format!("/v1/ws?{secret}&channel=a")), "/v1/ws?channel=a", "{secret}");
    }
    for path in ["/v1/ws/eyJhbGciOiJIUzI1NiJ9.e30.s", "/%65yJhbGciOiJIUzI1NiJ9.e30.s/v1/ws", "/access_token=s"] {
        assert_eq!(redacted(path), "(hidden)");
        assert_eq!(redacted(&format!("{path}?channel=a")), "(hidden)?channel=a");
    }
}

proptest! {
    #[test]
    fn no_head_makes_reading_panic(
        query in "[ -~]{0,80}",
        values in proptest::collection::vec(proptest::collection::vec(32_u8..=255, 0..40), 5),
    ) {
        let names = ["authorization", "sec-websocket-protocol", "cookie", "last-event-id", "last-event-id"];
        let mut parts = head("/", &[]);
        for (name, value) in names.iter().zip(&values) {
            if let Ok(value) = HeaderValue::from_bytes(value) {
                parts.headers.append(*name, value);
            }
        }
        if let Ok(uri) = format!("/v1/ws?{query}").parse() {
            parts.uri = uri;
        }
        let _ = StreamRequest::read(&parts, &with_cookie());
        prop_assert!(!redacted_path(&parts.uri).to_lowercase().contains("access_token"));
    }
}
