//! The text files of a folder, and JSON in them.

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::ModelFileError;

const BYTE_ORDER_MARK: char = '\u{feff}';

/// A struct of a JSON object alone; serde would take an array of its fields as well.
#[derive(Debug, Default)]
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// Keeps a key that holds `null` apart from one that is not there.
pub(super) fn even_null<'de, T, D>(deserializer: D) -> Result<Option<Option<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::deserialize(deserializer).map(Some)
}

/// The text of a file of the folder, without a byte-order mark; `None` when there is no such file.
pub(super) fn read_text(folder: &Path, name: &str) -> Result<Option<String>, ModelFileError> {
    let path = folder.join(name);
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(ModelFileError::Open { path, source }),
    };
    match String::from_utf8(bytes) {
        Ok(mut text) => {
            if text.starts_with(BYTE_ORDER_MARK) {
                text.drain(..BYTE_ORDER_MARK.len_utf8());
            }
            Ok(Some(text))
        }
        Err(_) => {
            let file = path.display().to_string();
            Err(ModelFileError::Text { file, what: "its text".into() })
        }
    }
}

/// A JSON file of the folder, which holds an object; `None` when there is no such file.
pub(super) fn read_json<T: DeserializeOwned>(
    folder: &Path,
    name: &str,
) -> Result<Option<T>, ModelFileError> {
    read_text(folder, name)?.map(|text| parse(folder, name, &text)).transpose()
}

/// `text` as the JSON object that `name` holds.
pub(super) fn parse<T: DeserializeOwned>(
    folder: &Path,
    name: &str,
    text: &str,
) -> Result<T, ModelFileError> {
    let broken =
        |problem| ModelFileError::Json { file: folder.join(name).display().to_string(), problem };
    let mut reader = serde_json::Deserializer::from_str(text);
    // Its errors begin with the key.
    let Object(value) =
        serde_path_to_error::deserialize(&mut reader).map_err(|e| broken(e.to_string()))?;
    reader.end().map_err(|error| broken(error.to_string()))?;
    Ok(value)
}
