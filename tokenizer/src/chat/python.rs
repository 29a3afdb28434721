//! What templates expect of Python and of transformers, paid for in fuel.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::{clock, json};

/// Adds the functions, filters and methods of chat templates to `environment`.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("join", join_filter);
    environment.add_filter("string", string_filter);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |format: String| {
        clock::strftime(&format, clock::now_s())
            .map_err(|problem| Error::new(ErrorKind::InvalidOperation, problem))
    });
}

/// Methods of strings, lists and dictionaries.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (method, value.as_str()) {
        ("join", Some(separator)) => {
            let (items,): (Value,) = from_args(args)?;
            join(state, &items, separator, None)
        }
        ("format", Some(format)) => {
            pay_for_widths(state, format)?;
            unknown_method_callback(state, value, method, args)
        }
        _ => unknown_method_callback(state, value, method, args),
    }
}

/// Pays for the padding that `{:>1000}` asks for, before it is made.
fn pay_for_widths(state: &State<'_, '_>, format: &str) -> Result<(), Error> {
    for digits in format.split(|c: char| !c.is_ascii_digit()).filter(|run| !run.is_empty()) {
        state.consume_fuel(digits.parse::<u64>().unwrap_or(u64::MAX) / 64)?;
    }
    Ok(())
}

/// `items | join(', ', attribute='name')`.
fn join_filter(
    state: &State<'_, '_>,
    items: Value,
    separator: Option<String>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let attribute: Option<String> = kwargs.get("attribute")?;
    let named: Option<String> = kwargs.get("d")?;
    kwargs.assert_all_used()?;
    let separator = separator.or(named).unwrap_or_default();
    join(state, &items, &separator, attribute.as_deref())
}

fn string_filter(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    if value.as_str().is_some() {
        return Ok(value);
    }
    let mut text = MeteredText { state, text: String::new() };
    write!(text, "{value}").map_err(|_| Error::from(ErrorKind::OutOfFuel))?;
    Ok(Value::from(text.text))
}

/// Pays for each item before it copies it: a list may hold one long string a million times.
fn join(
    state: &State<'_, '_>,
    items: &Value,
    separator: &str,
    attribute: Option<&str>,
) -> Result<Value, Error> {
    let mut joined = MeteredText { state, text: String::new() };
    for (index, item) in items.try_iter()?.enumerate() {
        let item = attribute.map_or(Ok(item.clone()), |name| item.get_attr(name))?;
        let separator = if index > 0 { separator } else { "" };
        write!(joined, "{separator}{item}").map_err(|_| Error::from(ErrorKind::OutOfFuel))?;
    }
    Ok(Value::from(joined.text))
}

/// Text that costs fuel as it grows.
struct MeteredText<'s, 'e, 't> {
    state: &'s State<'e, 't>,
    text: String,
}

impl std::fmt::Write for MeteredText<'_, '_, '_> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.state.consume_fuel(1 + text.len() as u64 / 64).map_err(|_| std::fmt::Error)?;
        self.text.push_str(text);
        Ok(())
    }
}
