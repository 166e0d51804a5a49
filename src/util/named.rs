//! Enums whose values have names: one declaration gives the variants, what they mean, and the text that files,
//! command lines and messages use.

/// A value of a closed set, each with a name. [`named!`] declares such an enum.
pub trait Named: Copy {
    /// The names, one for each value.
    const NAMES: &'static [&'static str];
    /// The meaning of each value, in the order of the names; empty where the name says it.
    const MEANINGS: &'static [&'static str];
    /// Names that MaxDiffusion accepts and this program does not support yet.
    const NOT_YET: &'static [&'static str];

    fn name(self) -> &'static str;

    /// The value of a name or of an alias.
    fn from_name(name: &str) -> Option<Self>;
}

/// Declares an enum that is [`Named`], `Display` and `Deserialize`: `Variant = "name" | "alias"`, with `(default)`
/// behind the variant that a derived `Default` takes, and, after the variants, `not_yet [..]` for names that
/// MaxDiffusion has and this program does not support yet.
macro_rules! named {
    (
        $(#[$meta:meta])*
        pub enum $name:ident {
            $(
                $(#[doc = $doc:literal])*
                $variant:ident = $text:literal $(| $alias:literal)* $(($default:ident))?,
            )+
        }
        $(not_yet [$($not_yet:literal),+ $(,)?])?
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[doc = $doc])* $(#[$default])? $variant,)+
        }

        impl $name {
            /// All values.
            pub const ALL: [$name; [$($text),+].len()] = [$($name::$variant),+];

            /// The name in files, on the command line and in messages.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)+
                }
            }

            /// Other names that are accepted, the most usual first.
            pub const fn aliases(self) -> &'static [&'static str] {
                match self {
                    $(Self::$variant => &[$($alias),*],)+
                }
            }

            /// The value of a name or of an alias.
            pub fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($text $(| $alias)* => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }

        impl $crate::util::Named for $name {
            const NAMES: &'static [&'static str] = &[$($text),+];
            const MEANINGS: &'static [&'static str] = &[$(concat!($($doc),*)),+];
            const NOT_YET: &'static [&'static str] = &[$($($not_yet),+)?];

            fn name(self) -> &'static str {
                self.name()
            }

            fn from_name(name: &str) -> Option<Self> {
                Self::from_name(name)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
                let name = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                Self::from_name(&name).ok_or_else(|| {
                    serde::de::Error::unknown_variant(
                        &name,
                        <Self as $crate::util::Named>::NAMES,
                    )
                })
            }
        }
    };
}
pub(crate) use named;

#[cfg(test)]
mod tests {
    use super::Named;

    named! {
        /// A filter.
        #[derive(Default)]
        pub enum Filter {
            /// Keeps edges.
            Bicubic = "bicubic" | "cubic",
            Nearest = "nearest" (default),
        }
        not_yet ["lanczos"]
    }

    #[test]
    fn one_declaration_gives_names_aliases_and_meanings() {
        assert_eq!(Filter::default(), Filter::Nearest);
        assert_eq!(Filter::ALL.map(Filter::name), ["bicubic", "nearest"]);
        assert_eq!(Filter::from_name("cubic"), Some(Filter::Bicubic));
        assert_eq!(Filter::from_name("lanczos"), None);
        assert_eq!(Filter::Bicubic.aliases(), ["cubic"]);
        assert_eq!(Filter::NOT_YET, ["lanczos"]);
        assert_eq!(Filter::MEANINGS, [" Keeps edges.", ""]);
        assert_eq!(Filter::Nearest.to_string(), "nearest");
    }

    #[test]
    fn files_with_another_name_are_told_the_names() {
        let read: Filter = serde_json::from_str("\"cubic\"").unwrap();
        assert_eq!(read, Filter::Bicubic);
        let error = serde_json::from_str::<Filter>("\"box\"").unwrap_err();
        assert!(
            error.to_string().contains("`bicubic` or `nearest`"),
            "{error}"
        );
    }
}
