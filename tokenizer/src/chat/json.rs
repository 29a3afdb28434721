//! The `tojson` of chat templates: Python's `json.dumps(value, ensure_ascii=False)`, which, unlike
//! Jinja's own, escapes nothing for HTML.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, State, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Deepest indentation, in spaces for each level.
const MAX_INDENT: usize = 16;

/// `{{ value | tojson(indent=2) }}`.
///
/// # Errors
/// For arguments that `json.dumps` does not have, values that JSON does not have, and when the
/// fuel is used up.
pub(super) fn tojson(
    state: &State,
    value: &Value,
    indent: Option<usize>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => kwargs.get::<Option<usize>>("indent")?,
    };
    let separators: Option<(String, String)> =
        kwargs.get::<Option<Vec<String>>>("separators")?.and_then(|list| {
            let [item, key] = <[String; 2]>::try_from(list).ok()?;
            Some((item, key))
        });
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = separators.unwrap_or_else(|| (item.to_owned(), ": ".to_owned()));
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let indent = indent.map(|width| width.min(MAX_INDENT));
    let style = PythonStyle { item, key, indent, ensure_ascii, depth: 0, is_empty: true };
    let mut out = Metered { state, bytes: Vec::new() };
    let mut serializer = Serializer::with_formatter(&mut out, style);
    let written = if sort_keys {
        sorted(serde_json::to_value(value).map_err(invalid)?).serialize(&mut serializer)
    } else {
        value.serialize(&mut serializer)
    };
    written.map_err(invalid)?;
    Ok(Value::from(String::from_utf8_lossy(&out.bytes).into_owned()))
}

fn invalid(error: serde_json::Error) -> Error {
    if error.is_io() {
        return Error::from(ErrorKind::OutOfFuel);
    }
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}"))
}

fn sorted(value: serde_json::Value) -> serde_json::Value {
    match value {
        serde_json::Value::Object(map) => {
            let mut entries: Vec<_> = map.into_iter().map(|(k, v)| (k, sorted(v))).collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            serde_json::Value::Object(entries.into_iter().collect())
        }
        serde_json::Value::Array(items) => items.into_iter().map(sorted).collect(),
        other => other,
    }
}

/// Pays fuel for what is written, as minijinja does for its own filters.
struct Metered<'s, 'e, 't> {
    state: &'s State<'e, 't>,
    bytes: Vec<u8>,
}

impl Write for Metered<'_, '_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.state.consume_fuel(1 + bytes.len() as u64 / 64).map_err(io::Error::other)?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Layout and numbers as Python writes them.
struct PythonStyle {
    item: String,
    key: String,
    indent: Option<usize>,
    ensure_ascii: bool,
    depth: usize,
    /// Whether the list or object that is open has no element yet.
    is_empty: bool,
}

impl PythonStyle {
    fn new_line<W: ?Sized + Write>(&self, out: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => write!(out, "\n{:1$}", "", width * self.depth),
            None => Ok(()),
        }
    }

    fn open<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &str) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        out.write_all(bracket.as_bytes())
    }

    fn close<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &str) -> io::Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.new_line(out)?;
        }
        self.is_empty = false;
        out.write_all(bracket.as_bytes())
    }

    fn next<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.is_empty = false;
        self.new_line(out)
    }
}

impl Formatter for PythonStyle {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, "[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, "]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, "{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, "}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }

    fn write_f64<W: ?Sized + Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        out: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ensure_ascii {
            return out.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            // Noncharacters may be marks of the shield, which must come through.
            if c.is_ascii() || ('\u{FDD0}'..='\u{FDEF}').contains(&c) {
                write!(out, "{c}")?;
            } else {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}

/// Python's `repr` of a finite float: exponents below -4 and from 16.
fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) || value == 0.0 {
        return format!("{value:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::python_float;

    #[test]
    fn floats_as_python_prints_them() {
        for (value, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1.5e-7, "1.5e-07"),
            (0.0001, "0.0001"),
            (123_456_789.25, "123456789.25"),
            (9_999_999_999_999_998.0, "9999999999999998.0"),
            (1e300, "1e+300"),
        ] {
            assert_eq!(python_float(value), text);
        }
    }
}
