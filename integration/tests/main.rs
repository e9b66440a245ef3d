//! Whole-program tests: the real binary, judged by what it prints and by what others saw.

mod certs;
