"""Media encoders: pictures and sounds to embeddings of a text model, read from projector files (`mmproj`)."""
