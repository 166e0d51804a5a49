//! What uses what in `src/`: the order of modules that `docs/design.md` describes, and no circles between files.
//!
//! Parts under `#[cfg(test)]` are left out: they build their examples with what lies above them, and no program is
//! compiled from them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

const DESIGN: &str = "docs/design.md";
const SECTION: &str = "## The folders are the pipeline";

#[test]
fn a_module_uses_only_those_above_it_in_the_design() {
    let library = Library::read();
    let order = order();
    let listed: BTreeSet<&str> = order.iter().map(String::as_str).collect();
    let modules: BTreeSet<&str> = library
        .files
        .values()
        .filter_map(|file| file.module.first().map(String::as_str))
        .collect();
    assert_eq!(
        modules, listed,
        "modules of src/ (left) and of the table of {DESIGN}, {SECTION:?} (right)"
    );
    let position = |module: &str| order.iter().position(|m| m == module);
    let mut against = BTreeSet::new();
    for (name, file) in &library.files {
        let Some(own) = file.module.first() else {
            continue;
        };
        let used = file.paths.iter().filter_map(|path| path.first());
        for module in used.filter(|module| position(module) > position(own)) {
            against.insert((name.clone(), module.clone()));
        }
    }
    assert_none(&against, "uses, though it stands below it in the table,");
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let library = Library::read();
    let imports: BTreeMap<&str, BTreeSet<&str>> = library
        .files
        .iter()
        .map(|(name, file)| {
            let used = file.paths.iter().map(|path| library.definer(path));
            let used = used.filter(|used| !library.is_family(name, used));
            (name.as_str(), used.collect())
        })
        .collect();
    let reached: BTreeMap<&str, BTreeSet<&str>> = imports
        .keys()
        .map(|&name| (name, reachable(&imports, name)))
        .collect();
    let mut circles = BTreeSet::new();
    for (&from, used) in &imports {
        for &to in used.iter().filter(|to| reached[*to].contains(from)) {
            circles.insert((from.to_owned(), to.to_owned()));
        }
    }
    assert_none(&circles, "imports, in a circle,");
}

/// Every file that can be reached from `start` by imports.
fn reachable<'a>(
    imports: &BTreeMap<&'a str, BTreeSet<&'a str>>,
    start: &'a str,
) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut open = vec![start];
    while let Some(name) = open.pop() {
        for &next in &imports[name] {
            if found.insert(next) {
                open.push(next);
            }
        }
    }
    found
}

/// Fails with every pair that was found.
fn assert_none(found: &BTreeSet<(String, String)>, what: &str) {
    let lines: Vec<String> = found
        .iter()
        .map(|(from, to)| format!("{from} {what} {to}"))
        .collect();
    assert!(lines.is_empty(), "{}", lines.join("\n"));
}

/// The modules in the order of the design's table: rows from above, modules of a row from the left.
fn order() -> Vec<String> {
    let text = fs::read_to_string(DESIGN).unwrap();
    let (_, section) = text.split_once(SECTION).expect(SECTION);
    let section = section.split("\n## ").next().unwrap();
    let cells = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('|').next());
    cells
        .flat_map(|cell| cell.split_whitespace())
        .map(|name| name.trim_matches(['`', '/']).to_owned())
        .collect()
}

/// The files of the library, by path.
struct Library {
    files: BTreeMap<String, File>,
    /// The file of each module.
    modules: BTreeMap<Vec<String>, String>,
}

/// What a file of the library says.
#[derive(Debug, Default)]
struct File {
    module: Vec<String>,
    /// Paths that it names, from the root of the library.
    paths: BTreeSet<Vec<String>>,
    /// What it imports, by the name that it has in the file.
    imports: BTreeMap<String, Vec<String>>,
    /// Modules that are compiled for tests alone.
    tests: BTreeSet<Vec<String>>,
}

impl Library {
    fn read() -> Self {
        let mut files = BTreeMap::new();
        read_folder(Path::new("src"), &mut files);
        let tests: BTreeSet<Vec<String>> = files.values().flat_map(|f| f.tests.clone()).collect();
        files.retain(|_, file| !tests.iter().any(|test| file.module.starts_with(test)));
        let modules = files
            .iter()
            .map(|(name, file)| (file.module.clone(), name.clone()))
            .collect();
        let mut library = Library { files, modules };
        library.resolve();
        library
    }

    /// Makes paths that begin with a name of their file absolute, and drops those into other crates.
    fn resolve(&mut self) {
        let modules = &self.modules;
        for file in self.files.values_mut() {
            let absolute = |path: &Vec<String>, imports: &BTreeMap<String, Vec<String>>| {
                let (first, rest) = path.split_first()?;
                match first.as_str() {
                    "crate" => Some(rest.to_vec()),
                    _ => {
                        let child = [file.module.as_slice(), std::slice::from_ref(first)].concat();
                        let start = match modules.contains_key(&child) {
                            true => child,
                            false => imports
                                .get(first)?
                                .strip_prefix(&["crate".to_owned()])?
                                .to_vec(),
                        };
                        Some([start.as_slice(), rest].concat())
                    }
                }
            };
            file.paths = file
                .paths
                .iter()
                .filter_map(|path| absolute(path, &file.imports))
                .collect();
            let imports = file.imports.iter();
            file.imports = imports
                .filter_map(|(name, path)| Some((name.clone(), absolute(path, &file.imports)?)))
                .collect();
        }
    }

    /// The file that has what a path names, through re-exports.
    fn definer(&self, path: &[String]) -> &str {
        let mut path = path.to_vec();
        loop {
            let depth = (0..=path.len())
                .rev()
                .find(|&depth| self.modules.contains_key(&path[..depth]))
                .expect("the root is a module");
            let name = &self.modules[&path[..depth]];
            let next = path
                .get(depth)
                .and_then(|item| self.files[name].imports.get(item));
            match next {
                // An enum may be imported from itself.
                Some(next) if !next.starts_with(&path[..=depth]) => {
                    path = [next.as_slice(), &path[depth + 1..]].concat();
                }
                _ => return name,
            }
        }
    }

    /// Whether one file's module lies in the other's.
    fn is_family(&self, one: &str, other: &str) -> bool {
        let (one, other) = (&self.files[one].module, &self.files[other].module);
        one.starts_with(other) || other.starts_with(one)
    }
}

fn read_folder(folder: &Path, files: &mut BTreeMap<String, File>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_folder(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") && path != Path::new("src/main.rs") {
            let name = path.to_str().unwrap();
            let module = name.trim_start_matches("src/").trim_end_matches(".rs");
            let module: Vec<String> = module
                .split('/')
                .filter(|part| !matches!(*part, "mod" | "lib"))
                .map(str::to_owned)
                .collect();
            let tokens: TokenStream = fs::read_to_string(&path).unwrap().parse().expect(name);
            let mut file = File {
                module: module.clone(),
                ..File::default()
            };
            file.scan(tokens, &module);
            files.insert(name.to_owned(), file);
        }
    }
}

impl File {
    /// Notes what tokens of the module `module` name.
    fn scan(&mut self, tokens: TokenStream, module: &[String]) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut rest = tokens.as_slice();
        while let [first, after @ ..] = rest {
            rest = after;
            match (text(first).as_str(), after) {
                ("#", [attribute, item @ ..]) if is_test(attribute) => {
                    if let Some(name) = declared_module(item) {
                        self.tests.insert([module, &[name]].concat());
                    }
                    rest = after_item(item);
                }
                ("mod", [name, TokenTree::Group(body), ..]) => {
                    self.scan(body.stream(), &[module, &[text(name)]].concat());
                    rest = &after[2..];
                }
                ("use", _) => {
                    let end = after
                        .iter()
                        .position(|t| text(t) == ";")
                        .unwrap_or(after.len());
                    self.scan_use(&after[..end], module, Vec::new());
                    rest = &after[end..];
                }
                ("crate" | "self" | "super", [colon, ..]) if text(colon) == ":" => {
                    let path = path(first, after);
                    // Each name after the first has two colons before it.
                    rest = &after[3 * (path.len() - 1)..];
                    self.paths.insert(absolute(path, module));
                }
                _ => {}
            }
            if let TokenTree::Group(group) = first {
                self.scan(group.stream(), module);
            }
        }
    }

    /// Notes the paths of a `use`, each as `prefix` and what follows.
    fn scan_use(&mut self, tree: &[TokenTree], module: &[String], prefix: Vec<String>) {
        for branch in tree.split(|t| text(t) == ",") {
            let mut path = prefix.clone();
            let mut alias = None;
            let mut rest = branch;
            while let [first, after @ ..] = rest {
                rest = after;
                match first {
                    TokenTree::Group(group) => {
                        let branches: Vec<TokenTree> = group.stream().into_iter().collect();
                        self.scan_use(&branches, module, path.clone());
                        path.clear();
                    }
                    TokenTree::Ident(ident) if ident == "as" => {
                        alias = after.first().map(text);
                        rest = &[];
                    }
                    TokenTree::Ident(ident) => path.push(ident.to_string()),
                    // Of the rest a star remains, which names what the path before it does.
                    _ => {}
                }
            }
            // `{self}` is what stands before the braces.
            if path.last().is_some_and(|last| last == "self") {
                path.pop();
            }
            if let Some(last) = path.last().cloned() {
                let name = alias.unwrap_or(last);
                let path = absolute(path, module);
                self.imports.insert(name, path.clone());
                self.paths.insert(path);
            }
        }
    }
}

/// A path with `crate` in place of `self` and `super`. One that begins with another name stays.
fn absolute(path: Vec<String>, module: &[String]) -> Vec<String> {
    let mut module = module.to_vec();
    let mut rest = path.as_slice();
    while let [first, after @ ..] = rest {
        match first.as_str() {
            "super" => {
                module.pop();
            }
            "self" => {}
            _ => break,
        }
        rest = after;
    }
    match rest.len() == path.len() {
        true => path,
        false => [&["crate".to_owned()], module.as_slice(), rest].concat(),
    }
}

/// The path that begins with `first`: names with double colons between them.
fn path(first: &TokenTree, mut rest: &[TokenTree]) -> Vec<String> {
    let mut path = vec![text(first)];
    while let [
        TokenTree::Punct(a),
        TokenTree::Punct(b),
        TokenTree::Ident(name),
        after @ ..,
    ] = rest
        && (a.as_char(), b.as_char()) == (':', ':')
    {
        path.push(name.to_string());
        rest = after;
    }
    path
}

fn text(token: &TokenTree) -> String {
    match token {
        TokenTree::Group(_) | TokenTree::Literal(_) => String::new(),
        TokenTree::Ident(ident) => ident.to_string(),
        TokenTree::Punct(punct) => punct.as_char().to_string(),
    }
}

/// Whether an attribute is `#[cfg(test)]`.
fn is_test(attribute: &TokenTree) -> bool {
    attribute.to_string().replace(' ', "") == "[cfg(test)]"
}

/// The name of an item `mod name;`, whose content is in a file of its own.
fn declared_module(item: &[TokenTree]) -> Option<String> {
    let end = item.iter().position(is_end)?;
    match &item[..=end] {
        [.., keyword, name, semicolon] if text(keyword) == "mod" && text(semicolon) == ";" => {
            Some(text(name))
        }
        _ => None,
    }
}

/// What follows an item.
fn after_item(item: &[TokenTree]) -> &[TokenTree] {
    let end = item.iter().position(is_end);
    end.map_or(&[], |end| &item[end + 1..])
}

/// Whether a token ends an item: a semicolon or a body.
fn is_end(token: &TokenTree) -> bool {
    match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        other => text(other) == ";",
    }
}

#[test]
fn every_way_to_name_a_module_is_seen() {
    let source = r#"
        use crate::a::{self, b::C, d as e};
        pub use super::f::G;
        use h::I;
        use std::fmt;
        //! crate::comment
        fn j(x: crate::k::L) -> &'static str { vec![super::super::m::n(x), self::o::P]; "crate::text" }
        mod inner { use super::q::R; }
        #[cfg(test)]
        mod tests { use crate::not::This; }
        #[cfg(test)]
        mod more;
        macro_rules! s { () => { $crate::t::U } }
    "#;
    let module = ["x".to_owned(), "y".to_owned()];
    let mut file = File::default();
    file.scan(source.parse().unwrap(), &module);
    let paths: Vec<String> = file.paths.iter().map(|path| path.join("::")).collect();
    let expected = [
        "crate::a",
        "crate::a::b::C",
        "crate::a::d",
        "crate::k::L",
        "crate::m::n",
        "crate::t::U",
        "crate::x::f::G",
        "crate::x::y::o::P",
        "crate::x::y::q::R",
        "h::I",
        "std::fmt",
    ];
    assert_eq!(paths, expected);
    assert_eq!(file.imports["e"].join("::"), "crate::a::d");
    let tests: Vec<String> = file.tests.iter().map(|path| path.join("::")).collect();
    assert_eq!(tests, ["x::y::more"]);
}
