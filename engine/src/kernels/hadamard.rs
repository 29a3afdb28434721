//! The Walsh-Hadamard rotation, which spreads what is large in one element over all others, so that
//! four bits do for each (as in QuaRot, Ashkboos et al., 2024). Dots of two rotated vectors are
//! those of the vectors, and a rotation undoes itself.

/// Multiplies `x[dim]` by the symmetric orthogonal Hadamard matrix; where `dim` is no power of two,
/// each part as long as the largest power of two that divides it. The same operations in the same
/// order everywhere: additions, then one multiplication by `1 / sqrt(length)`.
pub(crate) fn rotate(x: &mut [f32]) {
    if x.is_empty() {
        return;
    }
    let length = 1 << x.len().trailing_zeros();
    let scale = 1.0 / (length as f32).sqrt();
    for part in x.chunks_exact_mut(length) {
        let mut half = 1;
        while half < length {
            for pair in part.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (low, high) in low.iter_mut().zip(high) {
                    (*low, *high) = (*low + *high, *low - *high);
                }
            }
            half *= 2;
        }
        part.iter_mut().for_each(|x| *x *= scale);
    }
}

#[cfg(test)]
mod tests {
    use super::rotate;

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    }

    #[test]
    fn it_undoes_itself_and_keeps_dots() {
        for dim in [16, 48, 64, 80, 96, 128, 256] {
            let vector = |seed: usize| -> Vec<f32> {
                (0..dim).map(|i| ((i * 37 + seed) % 101) as f32 / 50.0 - 1.0).collect()
            };
            let (a, b) = (vector(1), vector(63));
            let (mut ra, mut rb) = (a.clone(), b.clone());
            rotate(&mut ra);
            rotate(&mut rb);
            assert!((dot(&ra, &rb) - dot(&a, &b)).abs() < 1e-4, "{dim}");
            rotate(&mut ra);
            assert!(ra.iter().zip(&a).all(|(got, want)| (got - want).abs() < 1e-5), "{dim}");
        }
    }

    #[test]
    fn one_large_element_is_spread() {
        let mut x = [0.0; 64];
        x[5] = 8.0;
        rotate(&mut x);
        assert!(x.iter().all(|x| x.abs() == 1.0));
    }
}
