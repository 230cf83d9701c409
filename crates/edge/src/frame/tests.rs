use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits { max_message: 65_536 };
const MASK: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];

/// A masked frame as a client sends it; `first` is FIN, the reserved bits and the opcode.
fn client(first: u8, payload: &[u8]) -> Vec<u8> {
    let plain = frame(first & 0x0f, payload);
    let n_header = plain.len() - payload.len();
    let mut out = plain[..n_header].to_vec();
    out[0] = first;
    out[1] |= 0x80;
    out.extend(MASK);
    out.extend(payload.iter().zip(MASK.iter().cycle()).map(|(b, m)| b ^ m));
    out
}

/// A header that declares `n` bytes, with no payload behind it.
fn announced(first: u8, n: u64) -> Vec<u8> {
    let mut out = vec![first, 0xff];
    out.extend(n.to_be_bytes());
    out.extend(MASK);
    out
}

struct Fed {
    got: Vec<Inbound>,
    error: Option<FrameError>,
    n_held_bytes: usize,
}

fn feed_with(limits: Limits, pieces: &[&[u8]]) -> Fed {
    let mut assembler = Assembler::new();
    let mut fed = Fed { got: vec![], error: None, n_held_bytes: 0 };
    for piece in pieces {
        let mut out = |inbound| {
            fed.got.push(inbound);
            ControlFlow::Continue(())
        };
        let mut piece = piece.to_vec();
        match assembler.feed(&mut piece, &limits, &mut out) {
            Ok(n) => assert_eq!(n, piece.len()),
            Err(error) => fed.error = fed.error.or(Some(error)),
        }
        fed.n_held_bytes = fed.n_held_bytes.max(assembler.n_held_bytes());
    }
    fed
}

fn feed(bytes: &[u8]) -> Fed {
    feed_with(LIMITS, &[bytes])
}

fn text(s: &str) -> Inbound {
    Inbound::Text(Bytes::copy_from_slice(s.as_bytes()))
}

fn is_protocol(fed: &Fed) -> bool {
    matches!(fed.error, Some(FrameError::Protocol(_)))
}

#[test]
fn the_rfcs_own_masked_hello_is_read() {
    let fed = feed(&[0x81, 0x85, 0x37, 0xfa, 0x21, 0x3d, 0x7f, 0x9f, 0x4d, 0x51, 0x58]);
    assert_eq!(fed.got, [text("Hello")]);
}

#[test]
fn an_idle_assembler_is_small_and_holds_nothing() {
    assert!(size_of::<Assembler>() <= 16);
    let mut assembler = Assembler::new();
    let mut keep = |_| ControlFlow::Continue(());
    let mut bytes = client(0x81, b"hello");
    let (head, tail) = bytes.split_at_mut(8);
    assembler.feed(head, &LIMITS, &mut keep).unwrap();
    assert!(assembler.is_partial());
    assembler.feed(tail, &LIMITS, &mut keep).unwrap();
    assert!(!assembler.is_partial());
}

#[test]
fn a_ping_between_fragments_is_delivered_before_the_message() {
    let bytes = [client(0x01, b"he"), client(0x89, b"p"), client(0x00, b"l"), client(0x8a, b""), client(0x80, b"lo")];
    let fed = feed(&bytes.concat());
    assert_eq!(fed.got, [Inbound::Ping(Bytes::from_static(b"p")), Inbound::Pong, text("hello")]);
}

#[test]
fn unmasked_reserved_bits_and_reserved_opcodes_are_refused_with_nothing_delivered() {
    let mut bad = vec![vec![0x81, 0x00]];
    bad.extend([0xc1, 0xa1, 0x91].map(|first| client(first, b"x")));
    bad.extend([3, 4, 5, 6, 7, 11, 12, 13, 14, 15].map(|op| client(0x80 | op, b"x")));
    for bytes in bad {
        let fed = feed(&bytes);
        assert!(is_protocol(&fed) && fed.got.is_empty(), "{bytes:x?}");
    }
}

#[test]
fn what_came_before_a_fault_is_still_delivered() {
    let fed = feed(&[client(0x81, b"one"), client(0xc1, b"two"), client(0x81, b"three")].concat());
    assert_eq!(fed.got, [text("one")]);
    assert_eq!(fed.error.unwrap().reason(), CloseReason::BadMessage(Violation::Protocol));
}

#[test]
fn an_oversize_or_fragmented_control_frame_is_refused_before_its_payload() {
    for op in [8, 9, 10] {
        for bytes in [vec![0x80 | op, 0xfe], vec![0x80 | op, 0xff], vec![op]] {
            let fed = feed(&bytes);
            assert!(is_protocol(&fed), "{bytes:x?}");
            assert_eq!(fed.n_held_bytes, 0);
        }
    }
    assert_eq!(feed(&client(0x89, &[7; 125])).got, [Inbound::Ping(Bytes::from(vec![7; 125]))]);
}

#[test]
fn a_length_not_in_its_shortest_form_is_refused() {
    for n in [0_u16, 1, 125] {
        assert!(is_protocol(&feed(&[&[0x81, 0xfe][..], &n.to_be_bytes()].concat())), "{n}");
    }
    for n in [0_u64, 125, 126, 65_535, 1 << 63, (1 << 63) + 1, u64::MAX] {
        assert!(is_protocol(&feed(&announced(0x82, n))), "{n}");
    }
}

#[test]
fn a_length_bomb_is_too_large_at_once_and_a_legal_length_reserves_nothing() {
    for n in [65_537_u64, 1 << 20, 1 << 40, (1 << 63) - 1] {
        let fed = feed(&announced(0x82, n)[..10]);
        assert_eq!(fed.error, Some(FrameError::TooLarge), "{n}");
        assert_eq!(fed.n_held_bytes, 0);
    }
    let fed = feed(&announced(0x82, 65_536));
    assert_eq!((fed.error, fed.n_held_bytes), (None, 0));
    let fed = feed(&[announced(0x82, 65_536), vec![0; 100]].concat());
    assert!(fed.n_held_bytes <= 128, "{}", fed.n_held_bytes);
}

#[test]
fn broken_fragment_order_is_refused_with_nothing_delivered() {
    for frames in [
        vec![client(0x01, b"a"), client(0x01, b"b"), client(0x80, b"c")],
        vec![client(0x01, b"a"), client(0x82, b"b")],
        vec![client(0x80, b"a")],
        vec![client(0x00, b"a")],
    ] {
        let fed = feed(&frames.concat());
        assert!(is_protocol(&fed) && fed.got.is_empty(), "{frames:x?}");
    }
}

#[test]
fn fragments_are_summed_and_the_one_that_passes_the_limit_is_refused() {
    let part = vec![b'x'; 32_768];
    for first in [0x01, 0x02] {
        let fed = feed(&[client(first, &part), client(0x00, &part), client(0x00, b"y")[..2].to_vec()].concat());
        assert_eq!(fed.error, Some(FrameError::TooLarge));
        assert!(fed.got.is_empty());
    }
    let whole = feed(&[client(0x01, &part), client(0x00, &part), client(0x80, b"")].concat());
    assert_eq!(whole.got.len(), 1);
}

#[test]
fn every_length_around_a_boundary_is_read_whole_fragmented_and_byte_by_byte() {
    for n in [0, 1, 125, 126, 127, 65_534, 65_535, 65_536] {
        let payload: Vec<u8> = (0..n).map(|i| b'a' + (i % 26) as u8).collect();
        let want = [Inbound::Text(payload.clone().into())];
        assert_eq!(feed(&client(0x81, &payload)).got, want, "{n} whole");
        let (left, right) = payload.split_at(n / 2);
        let fragments = [client(0x01, left), client(0x80, right)].concat();
        let fed = feed(&fragments);
        assert_eq!(fed.got, want, "{n} fragmented");
        assert!(fed.n_held_bytes <= LIMITS.max_message);
        let single: Vec<&[u8]> = fragments.chunks(1).collect();
        assert_eq!(feed_with(LIMITS, &single).got, want, "{n} byte by byte");
    }
}

#[test]
fn a_message_at_the_limit_passes_and_one_byte_more_does_not_in_either_form() {
    for max_message in [1, 100, 125, 126, 70_000] {
        for n in [max_message - 1, max_message, max_message + 1] {
            let payload = vec![b'x'; n];
            let (left, right) = payload.split_at(n / 3);
            for bytes in [client(0x81, &payload), [client(0x01, left), client(0x80, right)].concat()] {
                let fed = feed_with(Limits { max_message }, &[&bytes]);
                let is_over = n > max_message;
                assert_eq!(fed.error, is_over.then_some(FrameError::TooLarge), "{n} of {max_message}");
                assert_eq!(fed.got.len(), usize::from(!is_over));
            }
        }
    }
}

#[test]
fn text_may_be_cut_inside_a_character_but_must_end_as_utf8() {
    let good = "a𝄞é".as_bytes();
    for cut in 0..=good.len() {
        let bytes = [client(0x01, &good[..cut]), client(0x00, b""), client(0x80, &good[cut..])].concat();
        assert_eq!(feed(&bytes).got, [text("a𝄞é")], "{cut}");
    }
    for bad in [&b"\xf0\x9d\x84"[..], b"\xed\xa0\x80", b"\xc0\x80", b"\xe0\x80\xaf", b"\xf4\x90\x80\x80", b"\xff"] {
        assert_eq!(feed(&client(0x81, bad)).error, Some(FrameError::NotUtf8), "{bad:x?}");
        for cut in 0..=bad.len() {
            let fed = feed(&[client(0x01, &bad[..cut]), client(0x80, &bad[cut..])].concat());
            assert_eq!(fed.error, Some(FrameError::NotUtf8), "{bad:x?} cut at {cut}");
        }
        assert_eq!(feed(&client(0x82, bad)).error, None);
    }
}

#[test]
fn text_fails_with_its_first_bad_byte_and_not_at_the_end_of_the_message() {
    let bytes = client(0x01, b"abc\xf4\x90\x80\x80def");
    assert_eq!(feed_with(LIMITS, &[&bytes[..10]]).error, None);
    assert_eq!(feed_with(LIMITS, &[&bytes[..11]]).error, Some(FrameError::NotUtf8));
}

#[test]
fn a_close_has_a_code_that_may_be_sent_or_none() {
    let close = |payload: &[u8]| feed(&client(0x88, payload));
    assert_eq!(close(b"").got, [Inbound::Close { code: None, reason: String::new() }]);
    for code in [1000_u16, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014, 3000, 3999, 4000, 4999] {
        let fed = close(&[&code.to_be_bytes()[..], "grüß".as_bytes()].concat());
        assert_eq!(fed.got, [Inbound::Close { code: Some(code), reason: "grüß".into() }]);
    }
    for code in [0_u16, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65_535] {
        assert!(is_protocol(&close(&code.to_be_bytes())), "{code}");
    }
    assert!(is_protocol(&close(b"\x03")));
    assert_eq!(close(b"\x03\xe8\xff").error, Some(FrameError::NotUtf8));
}

#[test]
fn nothing_is_delivered_after_a_close_an_error_or_an_end() {
    let after = [client(0x81, b"late"), client(0x89, b"late")].concat();
    let fed = feed_with(LIMITS, &[&[client(0x88, b"\x03\xe8"), after.clone()].concat(), &after]);
    assert_eq!(fed.got.len(), 1);
    assert_eq!(fed.error, None);
    let fed = feed_with(LIMITS, &[&[0x80, 0x80], &after]);
    assert!(is_protocol(&fed) && fed.got.is_empty());
    let mut assembler = Assembler::new();
    assembler.end();
    let n = assembler.feed(&mut after.clone(), &LIMITS, &mut |_| panic!("delivered")).unwrap();
    assert_eq!(n, after.len());
}

#[test]
fn empty_fragments_are_counted_and_end_at_their_bound() {
    let endless = |n: usize| {
        let mut bytes = client(0x01, b"x");
        (0..n).for_each(|_| bytes.extend(client(0x00, b"")));
        bytes.extend(client(0x80, b"y"));
        feed(&bytes)
    };
    assert_eq!(endless(MAX_EMPTY_FRAGMENTS).got, [text("xy")]);
    let fed = endless(MAX_EMPTY_FRAGMENTS + 1);
    assert_eq!(fed.error.unwrap().reason(), CloseReason::BadMessage(Violation::Policy));
}

#[test]
fn who_breaks_off_gets_the_rest_again_untouched() {
    let bytes = [client(0x81, b"one"), client(0x81, b"two"), client(0x89, b"p")].concat();
    let (mut left, mut got) = (bytes.clone(), vec![]);
    let mut assembler = Assembler::new();
    while !left.is_empty() {
        let mut out = |inbound| {
            got.push(inbound);
            ControlFlow::Break(())
        };
        let n = assembler.feed(&mut left, &LIMITS, &mut out).unwrap();
        left.drain(..n);
        assert_eq!(left, bytes[bytes.len() - left.len()..]);
    }
    assert_eq!(got, feed(&bytes).got);
}

#[test]
fn a_close_reason_is_cut_at_a_character_to_what_a_control_frame_holds() {
    assert_eq!(&close_frame(1001, "drain")[..], b"\x88\x07\x03\xe9drain");
    let cut = close_frame(1000, &"é".repeat(100));
    assert_eq!(cut.len(), 2 + 2 + 122);
    assert!(std::str::from_utf8(&cut[4..]).is_ok());
    assert_eq!(close_frame(1000, &"x".repeat(123)).len(), 2 + 125);
    assert_eq!(close_frame(1000, &"x".repeat(124)).len(), 2 + 125);
    assert_eq!(&empty_close_frame()[..], b"\x88\x00");
    assert_eq!(&pong_frame(b"p")[..], b"\x8a\x01p");
    assert_eq!(&ping_frame()[..], b"\x89\x00");
    assert_eq!(&binary_frame(b"b")[..], b"\x82\x01b");
}

/// Frames of one message, perhaps with control frames in between.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let payload = prop_oneof!["\\PC{0,200}".prop_map(|s| (1_u8, s.into_bytes())), {
        proptest::collection::vec(any::<u8>(), 0..400).prop_map(|b| (2, b))
    }];
    (payload, proptest::collection::vec((0..200_usize, any::<bool>()), 0..5)).prop_map(|((op, payload), cuts)| {
        let (mut out, mut rest, mut op) = (vec![], &payload[..], op);
        for (cut, is_pinged) in cuts {
            let (part, tail) = rest.split_at(cut.min(rest.len()));
            out.extend(client(op, part));
            if is_pinged {
                out.extend(client(0x89, &part[..part.len().min(125)]));
            }
            (op, rest) = (0, tail);
        }
        out.extend(client(0x80 | op, rest));
        out
    })
}

/// Cuts `bytes` after each of `lengths`, round and round.
fn cut<'a>(bytes: &'a [u8], lengths: &[usize]) -> Vec<&'a [u8]> {
    let (mut rest, mut pieces) = (bytes, vec![]);
    for n in lengths.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (piece, tail) = rest.split_at((*n).min(rest.len()));
        pieces.push(piece);
        rest = tail;
    }
    pieces
}

proptest! {
    #[test]
    fn however_a_stream_is_cut_the_messages_are_the_same(
        messages in proptest::collection::vec(message(), 1..6),
        lengths in proptest::collection::vec(1_usize..300, 1..8),
    ) {
        let bytes = messages.concat();
        let at_once = feed(&bytes);
        prop_assert_eq!(at_once.error, None);
        let in_pieces = feed_with(LIMITS, &cut(&bytes, &lengths));
        prop_assert_eq!(in_pieces.error, None);
        prop_assert_eq!(in_pieces.got, at_once.got);
        prop_assert!(in_pieces.n_held_bytes <= LIMITS.max_message + MAX_CONTROL_PAYLOAD);
    }

    #[test]
    fn garbage_never_panics_fails_alike_however_cut_and_is_never_held_beyond_the_limit(
        mut messages in proptest::collection::vec(message(), 0..3),
        garbage in proptest::collection::vec(any::<u8>(), 0..600),
        lengths in proptest::collection::vec(1_usize..100, 1..8),
        max_message in 0_usize..500,
    ) {
        messages.push(garbage);
        let bytes = messages.concat();
        let limits = Limits { max_message };
        let in_pieces = feed_with(limits, &cut(&bytes, &lengths));
        prop_assert!(in_pieces.n_held_bytes <= max_message + MAX_CONTROL_PAYLOAD);
        let at_once = feed_with(limits, &[&bytes]);
        prop_assert_eq!(in_pieces.got, at_once.got);
        prop_assert_eq!(in_pieces.error, at_once.error);
    }
}
