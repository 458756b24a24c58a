import { useRef } from "preact/hooks";

interface Props {
  label: string;
  name: string;
  onSave: (name: string) => void;
  onDone: () => void;
}

/** A field that edits a name in the list: Enter or leaving the field saves it, Escape cancels. */
export function NameField({ label, name, onSave, onDone }: Props) {
  const left = useRef(false);
  return (
    <input
      type="text"
      aria-label={label}
      defaultValue={name}
      maxLength={500}
      ref={(field) => {
        if (field && document.activeElement !== field && !left.current) field.select();
      }}
      onKeyDown={(event) => {
        if (event.key === "Escape") (left.current = true), onDone();
        else if (event.key === "Enter") event.currentTarget.blur();
      }}
      onBlur={(event) => {
        if (left.current) return;
        left.current = true;
        onSave(event.currentTarget.value.trim() || name);
        onDone();
      }}
    />
  );
}
