use proptest::prelude::*;

use super::*;

fn run(stops: &[&str], parts: &[&str]) -> (Vec<String>, String, bool) {
    let mut matcher = StopMatcher::new(stops.iter().map(|s| s.to_string()).collect());
    let mut matched = false;
    let texts = parts.iter().map(|part| {
        let step = matcher.push(part);
        matched = step.matched;
        step.text
    });
    let texts = texts.collect();
    (texts, matcher.finish(), matched)
}

#[test]
fn holds_back_what_may_become_a_stop() {
    assert_eq!(
        run(&["\nUser:"], &["Hi\n", "Us", "ed", "\nUser", ": x", "y"]),
        (["Hi", "", "\nUsed", "", "", ""].map(String::from).to_vec(), String::new(), true)
    );
    let (texts, rest, matched) = run(&["END"], &["EN", "EN"]);
    assert_eq!((texts, rest, matched), (vec![String::new(), "EN".into()], "EN".into(), false));
}

#[test]
fn first_complete_match_wins() {
    assert_eq!(run(&["abcd", "bc"], &["xabcd"]).0, ["xa"]);
    assert_eq!(run(&["c", "bc"], &["abc"]).0, ["a"]);
    assert_eq!(run(&["", "é"], &["aé"]), (vec!["a".into()], String::new(), true));
    assert_eq!(run(&[], &["a", "b"]).0, ["a", "b"]);
}

/// Text up to the stop that is complete first, and whether there is one.
fn naive(stops: &[String], text: &str) -> (String, bool) {
    for end in 0..=text.len() {
        let starts = stops.iter().filter(|stop| !stop.is_empty());
        let ended = starts.filter(|stop| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        if let Some(len) = ended.map(String::len).max() {
            return (text[..end - len].to_owned(), true);
        }
    }
    (text.to_owned(), false)
}

proptest! {
    #[test]
    fn as_the_naive_search(
        stops in prop::collection::vec("[abé]{0,4}", 0..4),
        parts in prop::collection::vec("[abé]{0,3}", 0..12),
    ) {
        let mut matcher = StopMatcher::new(stops.clone());
        let mut text = String::new();
        let mut matched = false;
        for part in &parts {
            let step = matcher.push(part);
            text.push_str(&step.text);
            matched |= step.matched;
            let so_far: String = parts.concat();
            prop_assert!(so_far.starts_with(&text));
        }
        text.push_str(&matcher.finish());
        prop_assert_eq!((text, matched), naive(&stops, &parts.concat()));
    }
}
