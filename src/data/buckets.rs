//! Aspect-ratio buckets: the sizes that pictures of several shapes are cropped to, so that little of them is lost.
//!
//! NovelAI's rule as kohya's sd-scripts have it (`make_bucket_resolutions` and `BucketManager.select_bucket`): sides
//! are multiples of a step, areas the largest that do not exceed that of the resolution, and a picture goes to the size
//! whose ratio of width to height is nearest to its own.

use super::DataError;

/// Most sizes: each is a program of its own.
const MOST: usize = 512;

/// How buckets are made. All values are pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketOptions {
    /// The side of the square whose area no bucket exceeds.
    pub resolution: usize,
    /// The shortest and the longest side; they are rounded outwards to multiples of the step.
    pub min_side: usize,
    pub max_side: usize,
    /// What sides are multiples of.
    pub steps: usize,
}

/// The sizes that a dataset's pictures may have.
#[derive(Clone, Debug, PartialEq)]
pub struct Buckets {
    options: BucketOptions,
    /// Width and height, ascending.
    sizes: Vec<[usize; 2]>,
    /// Width over height of each.
    ratios: Vec<f64>,
}

impl Buckets {
    /// # Errors
    /// [`DataError::Option`] for a step of 0 or above a side, sides that do not enclose the resolution, or more than 512 sizes.
    pub fn new(options: BucketOptions) -> Result<Buckets, DataError> {
        let BucketOptions {
            resolution,
            min_side,
            max_side,
            steps,
        } = options;
        let refuse = |option, value: usize, expected: String| {
            Err(DataError::Option {
                option,
                value: value.to_string(),
                expected,
            })
        };
        if steps == 0 || steps > resolution {
            let expected = format!("1 to the resolution, {resolution}");
            return refuse("bucket_reso_steps", steps, expected);
        }
        if min_side < steps || min_side > resolution {
            let expected = format!("bucket_reso_steps={steps} to the resolution, {resolution}");
            return refuse("min_bucket_reso", min_side, expected);
        }
        if max_side < resolution {
            let expected = format!("at least the resolution, {resolution}");
            return refuse("max_bucket_reso", max_side, expected);
        }
        let down = |side: usize| side / steps * steps;
        let (min_side, max_side) = (down(min_side), max_side.next_multiple_of(steps));
        if (max_side - min_side) / steps >= MOST / 2 {
            let expected =
                format!("larger: {min_side} to {max_side} in these steps is too many sizes");
            return refuse("bucket_reso_steps", steps, expected);
        }
        let area = resolution * resolution;
        let mut sizes = vec![[down(resolution); 2]];
        for width in (min_side..=max_side).step_by(steps) {
            let height = max_side.min(down(area / width));
            if height >= min_side {
                sizes.extend([[width, height], [height, width]]);
            }
        }
        sizes.sort_unstable();
        sizes.dedup();
        let ratio = |size: &[usize; 2]| size[0] as f64 / size[1] as f64;
        Ok(Buckets {
            options: BucketOptions {
                min_side,
                max_side,
                ..options
            },
            ratios: sizes.iter().map(ratio).collect(),
            sizes,
        })
    }

    pub fn options(&self) -> BucketOptions {
        self.options
    }

    /// Heights and widths.
    pub fn sizes(&self) -> impl Iterator<Item = [usize; 2]> {
        self.sizes.iter().map(|[width, height]| [*height, *width])
    }

    /// The height and width of the bucket of a picture, which is enlarged where it is smaller.
    pub fn of(&self, [height, width]: [usize; 2]) -> [usize; 2] {
        if self.sizes.binary_search(&[width, height]).is_ok() {
            return [height, width];
        }
        let wanted = width as f64 / height as f64;
        let mut nearest = 0;
        for (at, ratio) in self.ratios.iter().enumerate() {
            if (ratio - wanted).abs() < (self.ratios[nearest] - wanted).abs() {
                nearest = at;
            }
        }
        let [width, height] = self.sizes[nearest];
        [height, width]
    }

    /// Says which side of a picture is shorter than the shortest of all buckets, if one is.
    pub(super) fn too_small(&self, [height, width]: [usize; 2]) -> Option<String> {
        let least = self.options.min_side;
        (height.min(width) < least).then(|| {
            format!(
                "{width}x{height} pixels are below the smallest bucket, whose side is min_bucket_reso={least}: lower it, or \
                 enlarge the picture"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(resolution: usize) -> BucketOptions {
        BucketOptions {
            resolution,
            min_side: resolution / 2,
            max_side: resolution * 2,
            steps: 64,
        }
    }

    #[test]
    fn sizes_have_the_resolutions_area_at_most() {
        for resolution in [512, 768, 1024] {
            let buckets = Buckets::new(options(resolution)).unwrap();
            let sizes: Vec<[usize; 2]> = buckets.sizes().collect();
            assert!(sizes.contains(&[resolution; 2]));
            for [height, width] in sizes.iter().copied() {
                assert!(height % 64 == 0 && width % 64 == 0);
                let area = height * width;
                assert!(area <= resolution * resolution && area * 5 > resolution * resolution * 4);
                assert!(sizes.contains(&[width, height]));
                assert_eq!(buckets.of([height, width]), [height, width]);
            }
        }
        let small = Buckets::new(options(512)).unwrap();
        assert_eq!(small.too_small([256, 300]), None);
        let problem = small.too_small([300, 255]).unwrap();
        assert!(
            problem.contains("255x300") && problem.contains("256"),
            "{problem}"
        );
    }

    #[test]
    fn what_makes_no_buckets_is_refused() {
        let good = options(512);
        for (bad, expected) in [
            (BucketOptions { steps: 0, ..good }, "bucket_reso_steps=0"),
            (BucketOptions { steps: 1, ..good }, "bucket_reso_steps=1"),
            (
                BucketOptions {
                    min_side: 600,
                    ..good
                },
                "min_bucket_reso=600",
            ),
            (
                BucketOptions {
                    min_side: 0,
                    ..good
                },
                "min_bucket_reso=0",
            ),
            (
                BucketOptions {
                    max_side: 448,
                    ..good
                },
                "max_bucket_reso=448",
            ),
        ] {
            let error = Buckets::new(bad).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
