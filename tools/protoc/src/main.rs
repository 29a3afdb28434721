//! The part of protoc's command line that prost's build scripts use, on protox.
//!
//! Example: `protoc --include_imports --include_source_info -o out.bin -I proto proto/a.proto`

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (mut out, mut includes, mut files) = (None, Vec::new(), Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--version" => {
                println!("libprotoc 30.0 (protox)");
                return Ok(());
            }
            "-o" => out = arguments.next().map(PathBuf::from),
            "-I" => includes.extend(arguments.next().map(PathBuf::from)),
            "--include_imports" | "--include_source_info" => {}
            flag if flag.starts_with('-') => return Err(format!("unknown flag {flag}").into()),
            file => files.push(PathBuf::from(file)),
        }
    }
    let out = out.ok_or("-o FILE is missing")?;
    let set = protox::Compiler::new(&includes)?
        .include_imports(true)
        .include_source_info(true)
        .open_files(&files)?
        .file_descriptor_set();
    std::fs::write(out, set.encode_to_vec())?;
    Ok(())
}
