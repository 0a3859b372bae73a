//! Part of Gradus.
