//! Checks the declarations of `types.rs` against the C header, with the compiler that builds the CPU plugin.

use std::fmt::Write;

use super::types::*;

/// A C++ source that compiles where every struct of `types.rs` has the sizes and offsets of the
/// header's, and every function its place in the plugin's table.
pub fn assertions() -> String {
    let mut source = String::from(
        "// Written from the declarations in src/pjrt/ffi/types.rs.\n\
         #include <cstddef>\n\
         #include \"xla/pjrt/c/pjrt_c_api.h\"\n\n\
         #define MAXDIFF_SAME(header, ours) static_assert((header) == (ours), \"src/pjrt/ffi/types.rs\")\n",
    );
    let mut same = |header: &str, ours: usize| {
        // Writing to a string cannot fail.
        let _ = writeln!(source, "MAXDIFF_SAME({header}, {ours});");
    };
    same(
        "offsetof(PJRT_Api, PJRT_Error_Destroy)",
        size_of::<PJRT_Api_Head>(),
    );
    same(
        "offsetof(PJRT_Api, pjrt_api_version) + offsetof(PJRT_Api_Version, major_version)",
        std::mem::offset_of!(PJRT_Api_Head, major_version),
    );
    for (function, _) in FUNCTIONS {
        let place = size_of::<PJRT_Api_Head>() + function.index * size_of::<usize>();
        same(&format!("offsetof(PJRT_Api, {})", function.name), place);
    }
    for layout in FUNCTIONS.iter().map(|(_, layout)| layout).chain(SHARED) {
        let name = layout.name;
        same(&format!("{name}_STRUCT_SIZE"), layout.struct_size);
        same(&format!("sizeof({name})"), layout.size);
        for (field, offset) in layout.fields {
            let field = in_header(field);
            same(&format!("offsetof({name}, {field})"), *offset);
        }
    }
    source
}

/// The header's name of a field: it has the words that Rust keeps for itself, and no name for the
/// union of a named value.
fn in_header(field: &str) -> &str {
    match field {
        "value" => "string_value",
        _ => field.strip_prefix("r#").unwrap_or(field),
    }
}

#[cfg(test)]
mod tests {
    use super::super::api::OLDEST_MINOR;
    use super::*;

    /// One line of each kind; that they hold is for the C++ compiler to say, when it builds the
    /// plugin that the tests of `pjrt` run on.
    #[test]
    fn every_declaration_is_asserted() {
        let source = assertions();
        for line in [
            "MAXDIFF_SAME(offsetof(PJRT_Api, PJRT_Error_Destroy), 40);",
            "MAXDIFF_SAME(offsetof(PJRT_Api, PJRT_Client_Compile), 200);",
            "MAXDIFF_SAME(PJRT_Buffer_MemoryLayout_STRUCT_SIZE, 76);",
            "MAXDIFF_SAME(sizeof(PJRT_Buffer_MemoryLayout), 80);",
            "MAXDIFF_SAME(offsetof(PJRT_NamedValue, type), 32);",
            "MAXDIFF_SAME(offsetof(PJRT_NamedValue, string_value), 40);",
        ] {
            assert!(source.contains(&format!("{line}\n")), "{line}\n{source}");
        }
        let fields = FUNCTIONS.iter().map(|(_, layout)| layout).chain(SHARED);
        let fields: usize = fields.map(|layout| 2 + layout.fields.len()).sum();
        let lines = source.matches("\nMAXDIFF_SAME(").count();
        assert_eq!(lines, 2 + FUNCTIONS.len() + fields);
    }

    #[test]
    fn no_function_is_newer_than_the_oldest_plugin_accepted() {
        // Everything up to `PJRT_Memory_Kind_Id` (index 97) is in the table since it was last put in
        // a new order, in 0.57.
        assert_eq!(OLDEST_MINOR, 57);
        for (function, _) in FUNCTIONS {
            assert!(function.index <= 97, "{} came after 0.57", function.name);
        }
    }
}
