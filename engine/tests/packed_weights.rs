//! Packed weights from a file: the same logits to the bit, whatever was in the file's place.

#![allow(clippy::unwrap_used)]

#[path = "../../model-files/tests/support/mod.rs"]
mod support;

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use baton_engine::backend::{Backend, LogitRows, NoSink, Span};
use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_engine::load::{
    LoadEvent, LoadObserver, LoadProgress, LoadStage, WeightsCache, WeightsMemory,
};
use baton_model_files::ModelFile;
use baton_types::BlockId;
use support::families::{self, FAMILIES};
use support::{Dtype, Gguf, Shape};
use tempfile::TempDir;

/// Where the tiny model's first matrix begins: what is before changes with the model's time.
const DATA_AT: usize = 4096;

/// What a load has told, in words.
#[derive(Default)]
struct Heard {
    events: Mutex<Vec<String>>,
    stages: Mutex<Vec<LoadStage>>,
}

impl LoadObserver for Heard {
    fn progress(&self, progress: LoadProgress) {
        assert!(progress.done_bytes <= progress.total_bytes, "{progress:?}");
        self.stages.lock().unwrap().push(progress.stage);
    }

    fn event(&self, event: &LoadEvent) {
        self.events.lock().unwrap().push(match event {
            LoadEvent::Mapped { was_there: true, .. } => "mapped".into(),
            LoadEvent::Mapped { was_there: false, .. } => "written".into(),
            LoadEvent::Copied { .. } => "copied".into(),
            LoadEvent::Refused { path, reason } => {
                assert!(path.exists());
                format!("refused: {reason}")
            }
            LoadEvent::NotWritten { reason, .. } => format!("not written: {reason}"),
            LoadEvent::InMemory => "in memory".into(),
        });
    }
}

/// A model in a folder of its own, and a folder for what is packed.
struct Model {
    folder: TempDir,
    path: PathBuf,
}

impl Model {
    fn new(bytes: &[u8]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, bytes).unwrap();
        Self { folder, path }
    }

    fn tiny() -> Self {
        Self::new(&tiny(Dtype::Q4_1, 5))
    }

    fn cache(&self) -> WeightsCache {
        WeightsCache::Folder(self.folder.path().join("cache"))
    }

    /// The one file in the cache.
    fn packed(&self) -> PathBuf {
        let mut files = fs::read_dir(self.folder.path().join("cache")).unwrap();
        let file = files.next().unwrap().unwrap().path();
        assert!(files.next().is_none(), "more than one file is left");
        assert_eq!(file.extension().unwrap(), "baton-packed");
        file
    }

    /// Replaces the packed file, which nobody may write to.
    fn replace(&self, bytes: &[u8]) {
        let path = self.packed();
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    }

    /// Loads; says what was heard, and computes.
    fn load(&self, cache: &WeightsCache) -> (Vec<String>, Vec<u32>) {
        let (heard, logits) = load(&self.path, cache);
        (heard.events.into_inner().unwrap(), logits)
    }
}

fn tiny(dtype: Dtype, seed: u64) -> Vec<u8> {
    Gguf::tiny(Shape::tiny(dtype), dtype, seed).to_bytes()
}

fn load(path: &Path, cache: &WeightsCache) -> (Heard, Vec<u32>) {
    let model = ModelFile::open(path).unwrap();
    let heard = Heard::default();
    let config = CpuConfig { threads: 2, weights_cache: cache.clone(), ..CpuConfig::default() };
    let mut backend = CpuBackend::load(&model, config, &heard).unwrap();
    let tokens: Vec<u32> = (0..20).map(|i| (i * 7 + 1) % model.spec().vocab as u32).collect();
    let blocks = [BlockId(0), BlockId(1)];
    let (tokens, logits) = (&tokens[..], LogitRows::All);
    let span = Span { tokens, first_position: 0, blocks: &blocks, logits, streaming: None };
    let logits = backend.step(&[span], &mut NoSink).unwrap();
    (heard, logits.iter().map(|x| x.to_bits()).collect())
}

#[test]
fn every_format_and_family_comes_back_bit_for_bit() {
    let formats = Dtype::ALL.map(|dtype| tiny(dtype, 5)).into_iter();
    let families = FAMILIES.iter().flat_map(|family| {
        [Dtype::F32, Dtype::Q4_0]
            .map(|dtype| families::family(family, Shape::tiny(dtype), dtype, 3).to_bytes())
    });
    for bytes in formats.chain(families) {
        let model = Model::new(&bytes);
        let (heard, want) = model.load(&WeightsCache::Off);
        assert_eq!(heard, [""; 0]);
        for told in ["written", "mapped"] {
            let (heard, got) = model.load(&model.cache());
            assert_eq!(heard, [told]);
            assert!(got == want, "logits differ when {told}");
        }
    }
}

#[test]
fn a_file_lies_beside_its_model_and_in_a_folder_of_a_model() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families/qwen2");
    let copy = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json", "model.gguf"] {
        fs::copy(folder.join(name), copy.path().join(name)).unwrap();
    }
    let gguf = copy.path().join("model.gguf");
    for (model, packed) in [
        (copy.path(), copy.path().join("weights.baton-packed")),
        (&gguf, copy.path().join("model.gguf.baton-packed")),
    ] {
        assert!(!packed.exists());
        let (first, want) = load(model, &WeightsCache::Beside);
        assert_eq!(first.events.into_inner().unwrap(), ["written"]);
        assert_eq!(fs::metadata(&packed).unwrap().mode() & 0o777, 0o444);
        let (second, got) = load(model, &WeightsCache::Beside);
        assert_eq!(second.events.into_inner().unwrap(), ["mapped"]);
        assert!(got == want);
    }
}

#[test]
fn what_may_not_be_read_by_all_is_packed_for_its_owner_alone() {
    let model = Model::tiny();
    fs::set_permissions(&model.path, Permissions::from_mode(0o640)).unwrap();
    model.load(&model.cache());
    assert_eq!(fs::metadata(model.packed()).unwrap().mode() & 0o777, 0o400);
}

#[test]
fn damage_is_told_and_mended() {
    let model = Model::tiny();
    let (_, want) = model.load(&model.cache());
    let good = fs::read(model.packed()).unwrap();
    let flipped = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 1;
        bytes
    };
    let other = Model::new(&tiny(Dtype::Q4_1, 6));
    other.load(&other.cache());
    let shape = Model::new(&tiny(Dtype::Q8_0, 5));
    shape.load(&shape.cache());
    let cases = [
        (Vec::new(), "ends after 0 of"),
        (vec![0; good.len()], "holds no packed weights"),
        (flipped(8), "version 0 of the file's form"),
        (flipped(12), "packed by version 0"),
        (flipped(30), "head is damaged"),
        (flipped(130), "head is damaged"),
        (flipped(good.len() - 1), "are damaged (checksum)"),
        (good[..good.len() / 2].to_vec(), "ends after"),
        (good[..100].to_vec(), "ends after 100 of"),
        ([&good[..], &[0]].concat(), "long instead of"),
        (fs::read(other.packed()).unwrap(), "packed from other weights"),
        (fs::read(shape.packed()).unwrap(), "matrices are not this model's"),
        (b"GGUF".repeat(1000), "holds no packed weights"),
    ];
    for (bytes, reason) in cases {
        model.replace(&bytes);
        let (heard, got) = model.load(&model.cache());
        assert_eq!(heard.len(), 2, "{heard:?}");
        assert!(heard[0].starts_with("refused: ") && heard[0].contains(reason), "{heard:?}");
        assert_eq!(heard[1], "written");
        assert!(got == want, "logits differ after: {reason}");
        let mended = fs::read(model.packed()).unwrap();
        assert!(mended[DATA_AT..] == good[DATA_AT..], "not mended after: {reason}");
    }
}

#[test]
fn a_file_that_others_may_write_to_is_not_mapped() {
    let model = Model::tiny();
    let (_, want) = model.load(&model.cache());
    fs::set_permissions(model.packed(), Permissions::from_mode(0o666)).unwrap();
    let (heard, got) = model.load(&model.cache());
    assert!(heard[0].contains("may write to it (mode 666)"), "{heard:?}");
    assert_eq!(heard[1], "written");
    assert!(got == want);
}

#[test]
fn without_a_place_the_weights_are_packed_in_memory() {
    let model = Model::tiny();
    let (_, want) = model.load(&WeightsCache::Off);
    // Root may write to every folder, but nobody into a file.
    let cache = WeightsCache::Folder(model.path.join("no-folder"));
    let (heard, got) = model.load(&cache);
    assert!(heard.iter().any(|one| one.starts_with("not written: ")), "{heard:?}");
    assert_eq!(heard.last().unwrap(), "in memory");
    assert!(got == want);
    // A folder in the file's place.
    model.load(&model.cache());
    let packed = model.packed();
    fs::remove_file(&packed).unwrap();
    fs::create_dir(&packed).unwrap();
    let (heard, got) = model.load(&model.cache());
    assert!(heard[0].contains("no plain file"), "{heard:?}");
    assert_eq!(heard.last().unwrap(), "in memory");
    assert!(got == want);
    // And in the place of the file that it is made from.
    fs::remove_dir(&packed).unwrap();
    let in_the_way = packed.with_extension("baton-packed.tmp");
    fs::create_dir(&in_the_way).unwrap();
    let (heard, got) = model.load(&model.cache());
    assert!(heard[0].contains(in_the_way.to_str().unwrap()), "{heard:?}");
    assert_eq!(heard.last().unwrap(), "in memory");
    assert!(got == want);
    // A model that is no file has no place at all.
    let inner = ModelFile::from_gguf_bytes(tiny(Dtype::Q4_1, 5), "m").unwrap();
    let config = CpuConfig { weights_cache: WeightsCache::Beside, ..CpuConfig::default() };
    CpuBackend::new(&inner, config).unwrap();
}

#[test]
fn what_a_crash_left_is_taken_over() {
    let model = Model::tiny();
    let (_, want) = model.load(&model.cache());
    let packed = model.packed();
    let left = packed.with_extension("baton-packed.tmp");
    fs::rename(&packed, &left).unwrap();
    fs::set_permissions(&left, Permissions::from_mode(0o600)).unwrap();
    let (heard, got) = model.load(&model.cache());
    assert_eq!(heard, ["written"]);
    assert!(got == want);
    assert_eq!(model.packed(), packed);
}

#[test]
fn a_link_in_the_place_of_the_new_file_is_not_followed() {
    let model = Model::tiny();
    let (_, want) = model.load(&model.cache());
    let packed = model.packed();
    let victim = model.folder.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    fs::remove_file(&packed).unwrap();
    let left = packed.with_extension("baton-packed.tmp");
    std::os::unix::fs::symlink(&victim, &left).unwrap();
    let (heard, got) = model.load(&model.cache());
    assert_eq!(heard.last().unwrap(), "in memory");
    fs::remove_file(&left).unwrap();
    fs::hard_link(&victim, &left).unwrap();
    let (heard, _) = model.load(&model.cache());
    assert_eq!(heard.last().unwrap(), "in memory");
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert!(got == want);
}

#[test]
fn many_that_start_at_once_leave_one_good_file() {
    let model = Model::tiny();
    let (_, want) = model.load(&WeightsCache::Off);
    for _ in 0..10 {
        let told: Vec<Vec<String>> = std::thread::scope(|scope| {
            let starters: Vec<_> = (0..6)
                .map(|_| {
                    scope.spawn(|| {
                        let (heard, got) = model.load(&model.cache());
                        assert!(got == want);
                        heard
                    })
                })
                .collect();
            starters.into_iter().map(|starter| starter.join().unwrap()).collect()
        });
        let count = |what: &str| told.iter().flatten().filter(|told| *told == what).count();
        assert_eq!((count("written"), count("mapped")), (1, 5), "{told:?}");
        fs::remove_file(model.packed()).unwrap();
    }
}

#[test]
fn the_model_is_read_again_only_when_its_file_has_changed() {
    let model = Model::tiny();
    let stages = || load(&model.path, &model.cache()).0.stages.into_inner().unwrap();
    let has_hashed = || stages().contains(&LoadStage::Hashing);
    assert!(has_hashed(), "there was no file");
    // What was changed a moment ago may be changed again within one tick of the clock.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert!(has_hashed(), "the model had no stamp");
    assert!(!has_hashed(), "the second load has stamped the file");
    // The same bytes under another time.
    let bytes = fs::read(&model.path).unwrap();
    fs::write(&model.path, &bytes).unwrap();
    let packed = fs::metadata(model.packed()).unwrap().ino();
    assert!(has_hashed(), "the model has changed");
    assert_eq!(fs::metadata(model.packed()).unwrap().ino(), packed, "there is no stamp to write");
    // Other bytes of the same size.
    fs::write(&model.path, tiny(Dtype::Q4_1, 6)).unwrap();
    let (heard, _) = model.load(&model.cache());
    assert!(heard[0].contains("packed from other weights") && heard[1] == "written", "{heard:?}");
}

/// A model as large as that huge pages matter, packed into small ones: a copy with many writes.
#[test]
fn small_pages_are_copied_unless_sharing_is_wanted() {
    let shape = Shape { vocab: 32_768, hidden: 1024, ..Shape::tiny(Dtype::Q4_1) };
    let model = Model::new(&Gguf::tiny(shape, Dtype::Q4_1, 5).to_bytes());
    let (_, want) = model.load(&WeightsCache::Off);
    model.load(&model.cache());
    let packed = fs::read(model.packed()).unwrap();
    assert!(packed.len() > 16 << 20);
    let name = model.packed();
    fs::remove_file(&name).unwrap();
    let mut file = fs::File::create(&name).unwrap();
    packed.chunks(4096).for_each(|piece| file.write_all(piece).unwrap());
    drop(file);
    fs::set_permissions(&name, Permissions::from_mode(0o444)).unwrap();
    let (heard, got) = model.load(&model.cache());
    let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if enabled.is_ok_and(|enabled| !enabled.contains("[never]")) {
        assert_eq!(heard, ["mapped", "copied"]);
    }
    assert!(got == want);
    let heard = Heard::default();
    let config = CpuConfig {
        weights_cache: model.cache(),
        weights_memory: WeightsMemory::Shared,
        ..CpuConfig::default()
    };
    CpuBackend::load(&ModelFile::open(&model.path).unwrap(), config, &heard).unwrap();
    assert_eq!(heard.events.into_inner().unwrap(), ["mapped"]);
}

/// Part of the weights would be of one model, part of another, under a fingerprint of either.
#[test]
fn a_model_that_changes_while_it_is_loaded_is_refused() {
    for cache in [None, Some(WeightsCache::Off)] {
        let model = Model::tiny();
        let opened = ModelFile::open(&model.path).unwrap();
        // Clocks of file systems are coarse.
        std::thread::sleep(std::time::Duration::from_millis(50));
        let file = fs::OpenOptions::new().write(true).open(&model.path).unwrap();
        let last = file.metadata().unwrap().len() - 1;
        std::os::unix::fs::FileExt::write_all_at(&file, &[7], last).unwrap();
        let weights_cache = cache.unwrap_or_else(|| model.cache());
        let config = CpuConfig { weights_cache, ..CpuConfig::default() };
        let error = CpuBackend::load(&opened, config, &Heard::default()).unwrap_err().to_string();
        assert!(error.contains("changed while they were read"), "{error}");
        let kept = fs::read_dir(model.folder.path().join("cache")).into_iter().flatten();
        let kept = kept.filter(|file| file.as_ref().unwrap().path().extension().is_some());
        assert!(kept.flatten().all(|file| file.file_name().to_string_lossy().ends_with("tmp")));
    }
}

#[test]
fn a_place_without_a_slash_may_be_a_keyword_that_was_meant() {
    assert_eq!("off".parse(), Ok(WeightsCache::Off));
    assert_eq!("./off".parse(), Ok(WeightsCache::Folder("./off".into())));
    for wrong in ["OFF", "no", ""] {
        let error = wrong.parse::<WeightsCache>().unwrap_err().to_string();
        assert!(error.contains("give beside, off, or a folder with a slash"), "{error}");
    }
}
