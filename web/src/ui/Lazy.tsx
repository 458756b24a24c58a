import type { ComponentType } from "preact";
import { useEffect, useState } from "preact/hooks";

/** A component without properties, loaded when it is first shown. Nothing is shown if it cannot be loaded. */
export function Lazy({ load }: { load: () => Promise<ComponentType> }) {
  const [Loaded, setLoaded] = useState<ComponentType | null>(null);
  useEffect(() => {
    let isCurrent = true;
    load().then((found) => isCurrent && setLoaded(() => found), () => undefined);
    return () => void (isCurrent = false);
  }, [load]);
  return Loaded && <Loaded />;
}
