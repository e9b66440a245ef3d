//! Ordinary text passes as it is.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::*;

/// Texts as hosts of credentials send them.
fn texts() -> Vec<(&'static str, Vec<u8>)> {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let octets: Vec<u8> = std::iter::repeat_with(|| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed.to_le_bytes()[0]
    })
    .take(60_000)
    .collect();
    let image = STANDARD.encode(&octets);
    let list: Vec<String> = octets.iter().take(2000).map(u8::to_string).collect();
    let dump: Vec<String> = octets.iter().take(2000).map(|octet| format!("{octet:02x}")).collect();
    let wide: Vec<u8> =
        "It is a truth universally acknowledged.".bytes().flat_map(|octet| [octet, 0]).collect();
    vec![
        (
            "prose",
            b"It is a truth universally acknowledged, that a sandbox asks.\r\n\r\nThen it waits. ".repeat(50),
        ),
        (
            "JSON",
            br#"{"role":"assistant","content":"One \"line\"\nand another, 50% of it \u20ac\/x"},"#.repeat(50),
        ),
        (
            "HTML",
            b"<a href=\"/x?a=1&amp;b=%20c\" title='&#39;q&#39;'>&lt;x&gt; &copy; &nbsp;</a>\n".repeat(50),
        ),
        ("events", b"data: {\"choices\":[{\"delta\":{\"content\":\"word sk\"}}]}\n\n".repeat(50)),
        ("image", format!("{{\"image\":\"data:image/png;base64,{image}\"}}").into_bytes()),
        ("folded image", image.as_bytes().chunks(76).collect::<Vec<_>>().join(&b"\r\n"[..])),
        ("list", format!("[{}]", list.join(", ")).into_bytes()),
        ("dump", dump.join(" ").into_bytes()),
        ("octets", octets),
        ("wide text", wide.repeat(20)),
    ]
}

/// What is not quite a credential.
fn near_misses() -> Vec<String> {
    let jwt = OTHERS[2];
    let cut = |text: &str| text.get(..text.len() - 1).unwrap().to_owned();
    vec![
        "sk-live".to_owned(),
        cut("sk-live/8fJ2kq0Zp7+abQx9"),
        "sk-live/8fJ2kq0Zp8+abQx91==".to_owned(),
        "sk-live/8fJ2kq0Zp7-abQx91==".to_owned(),
        "sk-live%2F8fJ2kq0Zp7%2DabQx91%3D%3D".to_owned(),
        r"sk-live\/8fJ2kq0Zp7\u002cabQx91==".to_owned(),
        "sk-sk-sk-live/8fJ2kq0Zp7".to_owned(),
        cut(OTHERS[0]),
        cut(OTHERS[1]),
        cut(jwt),
        jwt.replace("dozjgNry", "dozjgNrx"),
        jwt.rsplit_once('.').unwrap().0.to_owned(),
        STANDARD.encode("sk-live/8fJ2kq0Zp8+abQx91=="),
        STANDARD.encode(STANDARD.encode("sk-live/8fJ2kq0Zp8+abQx91==")),
        "100% of sk-live%2F8fJ2 \\u0073k- &amp; \\ %".to_owned(),
    ]
}

#[test]
fn p11_ordinary_text_passes_as_it_is() {
    let patterns = patterns();
    for (what, text) in texts() {
        for sizes in [&[usize::MAX][..], &[1], &[13, 700]] {
            let (passed, found) = scrub_in_pieces(&patterns, &text, sizes);
            assert_eq!(found, 0, "{what}");
            assert!(passed == text, "{what} by {sizes:?}");
        }
    }
    for miss in near_misses() {
        for text in [miss.clone(), format!("{{\"a\": \"{miss}\"}}\n"), format!("{miss} {miss}\n\n{miss}")] {
            for sizes in [&[usize::MAX][..], &[1], &[5]] {
                let passed = scrub_in_pieces(&patterns, text.as_bytes(), sizes);
                assert_eq!(passed, (text.clone().into_bytes(), 0), "{text} by {sizes:?}");
            }
        }
    }
}
