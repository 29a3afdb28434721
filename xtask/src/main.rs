//! `cargo xtask tidy`: the house rules that no compiler checks.

mod layers;
mod names;
mod packages;
mod sizes;

use std::process::ExitCode;

use anyhow::{anyhow, bail};

const USAGE: &str = "usage: cargo xtask tidy\n\n  Checks layering, unused dependencies, sizes of \
                     files and functions, and banned names.\n\n  Example: cargo xtask tidy";

fn main() -> ExitCode {
    let result = match std::env::args().nth(1).as_deref() {
        Some("tidy") => tidy(),
        Some("--help" | "-h") => {
            println!("{USAGE}");
            Ok(())
        }
        _ => Err(anyhow!(USAGE)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn tidy() -> anyhow::Result<()> {
    let sources = sizes::sources()?;
    let packages = packages::read()?;
    let mut broken = layers::check(&packages)?;
    broken.extend(packages::check_used(&packages, &sources)?);
    broken.extend(sizes::check(&sources));
    broken.extend(names::check(&sources));
    if broken.is_empty() {
        println!("tidy: {} files keep the house rules", sources.len());
        return Ok(());
    }
    broken.sort();
    bail!("{} house rules are broken:\n  {}", broken.len(), broken.join("\n  "));
}
