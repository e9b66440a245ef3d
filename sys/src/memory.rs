//! The allocator.

/// Returns freed memory to the kernel.
pub fn release_freed() {
    // SAFETY: it takes no pointer, and any thread may call it at any time.
    unsafe { libmimalloc_sys::mi_collect(true) }
}
