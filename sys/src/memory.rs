//! The allocator (mimalloc).

/// Returns freed memory to the kernel.
pub fn release_freed() {
    // SAFETY: the function takes no pointers and is thread-safe.
    unsafe { libmimalloc_sys::mi_collect(true) }
}
