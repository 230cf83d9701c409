//! A directory of a test's own, and what tests put there.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory of its own under the system's temporary one, removed on drop. Its path is short enough
/// for a Unix socket in it.
pub struct TempDir(PathBuf);

impl TempDir {
    /// `of` is part of its name, for whoever looks there.
    ///
    /// # Panics
    /// Where it cannot be made.
    pub fn new(of: &str) -> Self {
        static N: AtomicU32 = AtomicU32::new(0);
        let root = std::env::temp_dir();
        loop {
            let n = N.fetch_add(1, Ordering::Relaxed);
            let path = root.join(format!("tidegate-{of}-{}-{n}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Self(path),
                // Left over by an earlier process with this id.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => panic!("cannot make {}: {e}", path.display()),
            }
        }
    }

    /// Of the directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The path of a file in it, whether it is there or not.
    ///
    /// # Panics
    /// Where the system's temporary directory is no UTF-8.
    pub fn path_of(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a path in UTF-8").to_owned()
    }

    /// A file in it that holds this, put in the place of an earlier one at once, as editors and mounts do.
    ///
    /// # Panics
    /// Where it cannot be written.
    pub fn file(&self, name: &str, text: &str) -> String {
        let (beside, path) = (self.path_of("beside"), self.path_of(name));
        fs::write(&beside, text).expect("the directory is ours");
        fs::rename(&beside, &path).expect("the directory is ours");
        path
    }

    /// A certificate for 127.0.0.1 that vouches for itself, and is no CA; the paths of it and of its key.
    ///
    /// # Panics
    /// Where no `openssl` is installed.
    pub fn certificate(&self) -> (String, String) {
        let conf = self.file(
            "conf",
            "[req]\ndistinguished_name=dn\nx509_extensions=ext\nprompt=no\n[dn]\nCN=test\n\
             [ext]\nbasicConstraints=critical,CA:FALSE\nsubjectAltName=IP:127.0.0.1\n",
        );
        let (certificate, key) = (self.path_of("certificate"), self.path_of("key"));
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"])
            .args(["-config", &conf, "-keyout", &key, "-out", &certificate])
            .output()
            .expect("openssl is installed");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        (certificate, key)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
