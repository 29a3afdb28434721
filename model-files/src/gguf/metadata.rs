//! Typed access to metadata, each failure naming its key.

use baton_types::TokenId;

use super::header::Gguf;
use super::value::{ArrayRef, Value};
use crate::ModelFileError;

impl<'a> Gguf<'a> {
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ModelFileError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(&Value::Str(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong_type(key, "a string", other)),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ModelFileError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(&Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(self.wrong_type(key, "a boolean", other)),
        }
    }

    /// A count or size. An array is taken where all its elements agree.
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>, ModelFileError> {
        let value = match self.metadata.get(key) {
            None => return Ok(None),
            Some(&Value::Int(value)) => value,
            Some(Value::Array(array)) => self.uniform(key, array)?,
            Some(other) => return Err(self.wrong_type(key, "an integer", other)),
        };
        u32::try_from(value)
            .map(|value| Some(value as usize))
            .map_err(|_| self.bad_value(key, format!("{value} is out of range")))
    }

    pub(super) fn need_size(&self, key: &str) -> Result<usize, ModelFileError> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, ModelFileError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(&Value::Float(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong_type(key, "a float", other)),
        }
    }

    /// A token id below `vocab`.
    pub(super) fn token_id(
        &self,
        key: &str,
        vocab: usize,
    ) -> Result<Option<TokenId>, ModelFileError> {
        let Some(id) = self.size(key)? else { return Ok(None) };
        if id >= vocab {
            let problem = format!("token {id} is not in the vocabulary of {vocab}");
            return Err(self.bad_value(key, problem));
        }
        Ok(Some(id as TokenId))
    }

    pub(super) fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, ModelFileError> {
        self.array(key, "an array of strings", |array| array.strings(self.file, key))
    }

    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, ModelFileError> {
        self.array(key, "an array of numbers", |array| array.numbers(self.file, key))
    }

    fn array<T>(
        &self,
        key: &str,
        want: &'static str,
        read: impl Fn(&ArrayRef<'a>) -> Option<T>,
    ) -> Result<Option<T>, ModelFileError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        let elements = match value {
            Value::Array(array) => read(array),
            _ => None,
        };
        elements.map(Some).ok_or_else(|| self.wrong_type(key, want, value))
    }

    fn uniform(&self, key: &str, array: &ArrayRef<'a>) -> Result<i128, ModelFileError> {
        let numbers = array.numbers(self.file, key).unwrap_or_default();
        match numbers.first() {
            Some(first) if numbers.iter().all(|n| n == first) => Ok(*first as i128),
            _ => Err(self.bad_value(key, "layers that differ in it are not supported".into())),
        }
    }

    pub(super) fn missing(&self, key: &str) -> ModelFileError {
        ModelFileError::MissingKey { file: self.file.to_owned(), key: key.to_owned() }
    }

    pub(super) fn bad_value(&self, key: &str, problem: String) -> ModelFileError {
        ModelFileError::KeyValue { file: self.file.to_owned(), key: key.to_owned(), problem }
    }

    fn wrong_type(&self, key: &str, want: &'static str, got: &Value<'_>) -> ModelFileError {
        ModelFileError::KeyType {
            file: self.file.to_owned(),
            key: key.to_owned(),
            want,
            got: got.kind_name(),
        }
    }
}
