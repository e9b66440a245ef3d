//! The check of the fuzz target, for a bounded number of inputs in every test run.

#[path = "../fuzz/token_check.rs"]
mod token_check;

use proptest::prelude::*;

/// Inputs that the checks themselves once got wrong: a number beyond 64 bits, and a second valid signature.
#[test]
fn p12_inputs_of_interest() {
    token_check::check_token(br#"{"alg":40000005354274630000,"kid":""}"#);
    token_check::check_twin_signature();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn p12_any_bytes(input in proptest::collection::vec(any::<u8>(), 0..600)) {
        token_check::check_token(&input);
    }

    #[test]
    fn p12_almost_json(input in r#"\{("(alg|kid|typ|jku|iss|sub|aud|exp|nbf|iat|jti|cnf|sid)":("[a-zA-Z0-9:/.]{0,20}"|[0-9]{1,20}|\[\]|null|1e9|-1),?){0,8}\}"#) {
        token_check::check_token(input.as_bytes());
    }

    #[test]
    fn p12_almost_tokens(input in r"[a-zA-Z0-9_=-]{0,40}(\.[a-zA-Z0-9_=-]{0,80}){0,4}") {
        token_check::check_token(input.as_bytes());
    }
}
